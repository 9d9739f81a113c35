"""The Hugging Face Hub, through its own client `huggingface_hub`: models in, quantized files out.

The client is imported when a name of the Hub is met, not before: commands on files of this machine start
without it. Its settings are the user's (HF_TOKEN, HF_ENDPOINT, HF_HOME, HF_HUB_OFFLINE and others).
"""
