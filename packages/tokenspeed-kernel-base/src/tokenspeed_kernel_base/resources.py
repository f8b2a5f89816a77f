"""Resources: what a call needs besides tensors and options, and what outlives it.

A process group, a state cache, a workspace, weights in a kernel's own layout. An operator declares a parameter as a resource by
annotating it with a class derived from `Resource`::

    class ProcessGroup(Resource):
        def __init__(self, group): self.key = ("gloo", 2)

    @operator("comm", "all_reduce", formats=("x",))
    def all_reduce(x: Tensor, group: ProcessGroup, out: Tensor | None = None) -> Tensor: ...

Custom operators of PyTorch take no such objects. They are given the resource's ``handle``, a number, and `find` gives the living
resource again. Only weak references are kept here: whoever made a resource keeps it alive for as long as compiled code may use it.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Hashable, Mapping
from typing import Any, ClassVar, NoReturn, TypeVar

import torch

from tokenspeed_kernel_base.traits import TraitKind

R = TypeVar("R", bound="Resource")


class Resource:
    """Base class of resources.

    Attributes:
        key: part of the description of every call that is given the resource. Resources of one class with equal keys share
            decisions, so whatever hooks of operators read of a resource (``check``, ``traits``, ``formats``, ``fake``), and its
            device, must follow from class and key. Set it once, when the resource is made, and to something hashable. It is a
            plain attribute, because it is read at every call.
        handle: the number by which custom operators name this resource. Set when the object is made; never used twice.
        device: where the tensors of a call must be; None where any device will do. Without an index, any device of that type.
        trait_kinds: what `traits` may give, with the values of each: ``{"rounded": bool}``. A class that derives from one which an
            operator takes may add to them; its kernels are then declared after it.
        world_size: how many processes take part in a call that is given it. Where it is more than 1, no process may make calls that
            the others do not make, to measure them, say.
    """

    key: Hashable = None
    handle: int
    device: torch.device | None = None
    trait_kinds: ClassVar[Mapping[str, TraitKind]] = {}
    world_size: int = 1

    def __new__(cls: type[R], *args: Any, **kwargs: Any) -> R:
        self = super().__new__(cls)
        # Here and not in __init__, which a dataclass would replace; past __setattr__, which a frozen one forbids.
        object.__setattr__(self, "handle", next(_handles))
        _living[self.handle] = self
        return self

    @property
    def traits(self) -> Mapping[str, Any]:
        """Facts that calls which are given the resource state to kernels, beside those of the operator's ``traits`` hook. They must
        follow from class and key. They say what the resource is, so an override does not get past them, and a kernel that says
        nothing of one that is True is not given the resource."""
        return {}

    @property
    def card(self) -> str:
        """One sentence about the resource that ``explain`` shows; empty where there is nothing to say."""
        return ""

    def __copy__(self: R) -> R:
        """The resource itself, like `__deepcopy__`: copies of a call's arguments share it."""
        return self

    def __deepcopy__(self: R, memo: dict[int, Any]) -> R:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} belongs to the process that made it, and cannot be pickled")


_handles = itertools.count(1)
_living: weakref.WeakValueDictionary[int, Resource] = weakref.WeakValueDictionary()


def stated_by(resource: Resource) -> Mapping[str, Any]:
    """The traits that a resource states. Raises TypeError for one that its class does not declare, because no kernel could be
    declared for that."""
    traits = resource.traits
    for name in traits.keys() - resource.trait_kinds.keys():
        raise TypeError(f"a {type(resource).__name__} states the trait {name}, which trait_kinds of its class must declare")
    return traits


def find(handle: int) -> Resource:
    """The living resource of a handle.

    Raises:
        RuntimeError: there is none: it was deleted, or the handle is another process's.
    """
    found = _living.get(handle)
    if found is None:
        raise RuntimeError(
            f"the resource of handle {handle} is gone, and a compiled function still uses it: keep a reference to each resource "
            "for as long as what was compiled with it is called, and compile again in another process"
        )
    return found


def same_place(wanted: torch.device, got: torch.device) -> bool:
    """Whether a tensor's device is a resource's; without an index the latter stands for all devices of its type."""
    return wanted.type == got.type and wanted.index in (None, got.index)
