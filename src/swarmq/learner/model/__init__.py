"""The model and its computation: loading, attention over layouts, log-probabilities, LoRA, activation checkpointing.

Runs in the learner's ranks, with torch and transformers. Offers `layout_model.LayoutModel` and `loading.load_lm`; knows nothing of
batches, optimizers or other ranks, except for context parallelism.
"""
