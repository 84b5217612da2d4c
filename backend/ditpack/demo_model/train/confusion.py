"""Nouns that a text encoder takes for one another: finding them, and giving them embeddings that it tells apart.

The outputs of a trained encoder's MLPs can be a thousand times as long as its embeddings. Two tokens that the same
neurons answer then come out alike, however unlike their embeddings, and no gradient parts them again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ditpack.demo_model.words import spoken, synonyms
from ditpack.models.prompt import TEMPLATE

_ALIKE = 0.9  # cosine of two outputs from which on they count as one
_TRIED = 512  # embeddings for each token that is moved


@dataclass(frozen=True, slots=True)
class Confusion:
    """``tokens``: whom to move so that all are told apart. ``names``: of the icons that any of it touches."""

    tokens: tuple[int, ...]
    names: frozenset[str]


class Nouns:
    """The tokens of the nouns for ``names``, synonyms too, and what comes out for those nouns that are one token.

    ``language_model`` is a ``Qwen2_5_VLTextModel``, ``tokenizer`` a ``tokenizers.Tokenizer``.
    """

    def __init__(self, language_model: Any, tokenizer: Any, names: Iterable[str]) -> None:
        self.model = language_model
        self.names: dict[int, set[str]] = {}  # of a token in any noun
        self.whole: dict[int, set[str]] = {}  # of a token that is a whole noun
        self._uses: Counter[int] = Counter()
        for name in names:
            for noun in (spoken(name), *synonyms().get(name, ())):
                ids = tokenizer.encode(f" {noun}").ids
                for token in set(ids):
                    self._uses[token] += 1
                    self.names.setdefault(token, set()).add(name)
                if len(ids) == 1:
                    self.whole.setdefault(ids[0], set()).add(name)
        device = language_model.embed_tokens.weight.device
        self._before = torch.tensor(tokenizer.encode(TEMPLATE.partition("{}")[0] + "a").ids, device=device)

    @torch.no_grad()
    def directions(self, embeddings: Tensor) -> Tensor:
        """What comes out for tokens of these embeddings [N, width] behind "a" in a prompt: [N, width], of length 1."""
        if not len(embeddings):
            return embeddings
        before = self.model.embed_tokens(self._before).expand(len(embeddings), -1, -1)
        hidden = self.model(inputs_embeds=torch.cat((before, embeddings[:, None]), dim=1)).last_hidden_state
        return F.normalize(hidden[:, -1].float(), dim=1)

    def confused(self) -> Confusion:
        """Of each group that comes out alike and is not of one icon, all but the token that the most nouns have."""
        tokens = list(self.whole)
        outputs = self.directions(self.model.embed_tokens.weight[tokens].detach())
        alike: dict[int, set[int]] = {token: set() for token in tokens}
        for i, j in (outputs @ outputs.T > _ALIKE).nonzero().tolist():
            if not self.whole[tokens[i]] & self.whole[tokens[j]]:
                alike[tokens[i]].add(tokens[j])
        kept: set[int] = set()
        for token in sorted(tokens, key=lambda token: -self._uses[token]):
            if alike[token] and not alike[token] & kept:
                kept.add(token)
        moved = tuple(token for token in tokens if alike[token] and token not in kept)
        touched = {name for token in tokens if alike[token] for name in self.whole[token]}
        return Confusion(moved, frozenset(touched.union(*(self.names[token] for token in moved))))

    @torch.no_grad()
    def part(self, moved: Sequence[int]) -> None:
        """Give each of ``moved`` the one of many random embeddings whose output is the least like any other's."""
        weight = self.model.embed_tokens.weight
        length = weight[list(self.whole)].norm(dim=1).mean()
        taken = self.directions(weight[[token for token in self.whole if token not in set(moved)]])
        generator = torch.Generator().manual_seed(0)
        for token in moved:
            tried = torch.randn(_TRIED, weight.shape[1], generator=generator).to(weight.device)
            tried *= length / tried.norm(dim=1, keepdim=True)
            outputs = self.directions(tried)
            best = (outputs @ taken.T).amax(dim=1).argmin()
            weight[token] = tried[best]
            taken = torch.cat((taken, outputs[best, None]))
