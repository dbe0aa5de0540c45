"""The generator's own operations for a PyTorch trainer, with torch's autograd. Needs torch, which importing this package imports."""

from rollmesh.torch.dispatch import Dispatched, TokenDispatcher, token_dispatcher, token_dispatchers

__all__ = ["Dispatched", "TokenDispatcher", "token_dispatcher", "token_dispatchers"]
