"""Gives the samples of docs/frameworks.md a tiny GPT to train, on random text that is the same on every rank."""

import os

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel

N_RANKS = int(os.environ["WORLD_SIZE"])  # torchrun sets it
BATCH_SIZE = 6  # of all ranks together


def make_model():
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0,
                                      embd_pdrop=0, attn_pdrop=0, bos_token_id=0, eos_token_id=0))


class Text(torch.utils.data.Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, index):
        tokens = torch.randint(64, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def make_loader():
    return torch.utils.data.DataLoader(Text(), batch_size=BATCH_SIZE // N_RANKS)


def tokens_of(step):  # this rank's share of the batch
    size = BATCH_SIZE // N_RANKS
    start = step * BATCH_SIZE + dist.get_rank() * size
    return torch.stack([Text()[start + i]["input_ids"] for i in range(size)])


def print_mean(step, loss):
    dist.all_reduce(loss)
    if dist.get_rank() == 0:
        print("loss", step, loss.item() / N_RANKS)


def disconnect():
    dist.barrier()
    dist.destroy_process_group()
