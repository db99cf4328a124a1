"""A character-level transformer over a slow link.

    horovodrun -np 2 -H a:1,b:1 python examples/characters.py --send diloco

The text is generated. `--send` selects how the hosts exchange updates (docs/slow_links.md); one host sends nothing.
"""

import argparse
import random

import torch
from torch import nn
from torch.nn import functional

import horovod.torch as hvd

CHARACTERS = sorted(set("abcdefghijklmnopqrstuvwxyz0123456789 .,\n"))
SENDS = ("plain", "int8", "powersgd", "local", "diloco", "desloc")


def made_text(num_sentences: int, seed: int) -> torch.Tensor:
    """Return generated text as character numbers: sentences of a small grammar, and sums of two numbers."""
    chance = random.Random(seed)
    who = ("the captain", "a small dog", "my sister", "the old miller", "nobody", "a stranger")
    does = ("sees", "follows", "forgets", "paints", "waits for", "writes to")
    where = ("in the harbour", "on monday", "behind the mill", "before the rain", "at home")
    sentences = []
    for _ in range(num_sentences):
        a, b = chance.randrange(50), chance.randrange(50)
        sentences.append(f"{chance.choice(who)} {chance.choice(does)} {chance.choice(who)} {chance.choice(where)}.")
        sentences.append(f"{a} and {b} are {a + b}.")
    return torch.tensor([CHARACTERS.index(c) for c in "\n".join(sentences)])


class Characters(nn.Module):
    """A decoder: 2.7 million parameters with a width of 192 and 6 layers."""

    def __init__(self, width: int = 192, depth: int = 6, context: int = 64) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(len(CHARACTERS), width), nn.Embedding(context, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, len(CHARACTERS))
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(context))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        length = text.shape[1]
        x = self.characters(text) + self.places.weight[:length]
        return self.head(self.layers(x, mask=self.mask[:length, :length], is_causal=True))


def pieces(text: torch.Tensor, count: int, context: int, generator: torch.Generator) -> torch.Tensor:
    """Return random pieces of the text, each one character longer than the context."""
    starts = torch.randint(0, len(text) - context - 1, (count,), generator=generator)
    return torch.stack([text[start : start + context + 1] for start in starts])


def loss_of(model: nn.Module, piece: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(piece[:, :-1]).flatten(0, 1), piece[:, 1:].flatten())


def wrapped(send: str, optimizer: torch.optim.Optimizer):
    if send == "local":
        return hvd.LocalSGD(optimizer, every=10)
    if send == "diloco":
        return hvd.DiLoCo(optimizer, every=20)
    if send == "desloc":
        return hvd.DESLOC(optimizer, every=10)
    compression = {"plain": hvd.Compression.none, "int8": hvd.Compression.int8, "powersgd": hvd.Compression.powersgd()}
    return hvd.DistributedOptimizer(optimizer, compression=compression[send])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--send", choices=SENDS, default="powersgd")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    hvd.init()
    torch.manual_seed(options.seed)
    model, context = Characters(options.width, options.depth), 64
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = wrapped(options.send, torch.optim.AdamW(model.parameters(), lr=1e-3))
    text, unseen = made_text(5000, seed=0), made_text(200, seed=1)
    generator = torch.Generator().manual_seed(1000 * options.seed + hvd.rank())
    for step in range(options.steps):
        optimizer.zero_grad()
        loss = loss_of(model, pieces(text, options.batch_size, context, generator))
        loss.backward()
        optimizer.step()
        if hvd.rank() == 0 and step % 100 == 99:
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)
    if hasattr(optimizer, "exchange"):
        optimizer.exchange()
    with torch.no_grad():
        found = loss_of(model, pieces(unseen, 64, context, torch.Generator().manual_seed(0)))
    if hvd.rank() == 0:
        print(f"{hvd.size()} ranks, {options.send}: loss {found.item():.3f} on unseen text")


if __name__ == "__main__":
    main()
