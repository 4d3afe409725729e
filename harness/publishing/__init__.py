"""Makes tables, pictures and pages of what was measured, and packages of the stages."""
