def all_figures(recordings):
    return {}
