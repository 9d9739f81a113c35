"""Kimi Linear and Kimi K3: layers of Kimi Delta Attention (KDA) between layers of latent attention."""
