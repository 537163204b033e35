"""Small classifier of texts, for recipes of tests."""

import torch
from torch import nn


class Bag(nn.Module):
    """The mean of the embeddings of a text's tokens, dropout, and a linear layer."""

    def __init__(self, num_classes: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.dropout, self.head = nn.Embedding(vocabulary, 16), nn.Dropout(0.1), nn.Linear(16, num_classes)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        weights = attention_mask / attention_mask.sum(dim=1, keepdim=True)
        logits: torch.Tensor = self.head(self.dropout((self.tokens(input_ids) * weights[..., None]).sum(dim=1)))
        return logits
