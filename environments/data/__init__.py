"""Data sets that people bring: files, folders and what the Hugging Face Hub has, as prompts with a reward."""
