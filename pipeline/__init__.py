"""Tandem: pretrain and chat-tune a small GPT on the Hugging Face stack.

The folders are rooms on the path of the data, imported from left to right only (tests/test_architecture.py):
hardware artifacts recipe monitor sources tokenizer data model generation evals training callbacks report hub preflight,
then the entries pretrain, sft and chat.
"""
