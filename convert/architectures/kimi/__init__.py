"""Families with layers of Kimi Delta Attention (KDA) between layers of latent attention."""
