"""Llama, with Mistral and Mixtral, which its files describe too."""
