"""The forward pass of a model in torch, layer by layer: activations are observed, logits visited.

open          a Hugging Face folder, or a GGUF file, as a network and unread tensors
families/     networks of model families, put together from layers/
run, sweep    all layers over the chunks of a text; each layer's weights are read once
observe       who is shown what matrices multiply
logits        who is shown logits, a slice of the vocabulary at a time
gradients/    the same layers backwards, from labels drawn from the model's own predictions
text/         a text as chunks of tokens
work_folder   the folder in which an interrupted run resumes
device        where torch computes, and what is copied to and from there
cluster       layers computed by the workers of a scheduler
"""
