"""A model, and an EAGLE head that is often right without training.

Both are almost bigram models: their layers add little to the embeddings, and the same matrix gives the
logits. So the head predicts the next token unless the layers matter, and answers soon repeat themselves.
"""

import torch
from safetensors.torch import load_file, save_file

from tests.handoff import checkpoints

# Factor on the layers' output. With 0 the head is always right.
STRENGTH = 0.02


def model_and_head(folder):
    """Save both as checkpoints in `folder`; return the folders of model and head."""
    model, head = checkpoints.qwen2(folder / "model"), checkpoints.eagle(folder / "head")
    _weaken(model)
    embeddings = load_file(model / "model.safetensors")["model.embed_tokens.weight"]
    hidden = embeddings.shape[1]
    tensors = _weaken(head)
    tensors["embed_tokens.weight"] = embeddings
    # uses the token's embedding and ignores the model's last hidden state
    tensors["fc.weight"] = torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], dim=1)
    save_file(tensors, head / "model.safetensors")
    return model, head


def _weaken(folder):
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = tensor * STRENGTH
    save_file(tensors, folder / "model.safetensors")
    return tensors
