"""Resources: objects that a call needs besides tensors and options, and that outlive the call.

Examples are a process group, a state cache, and weights in a kernel's own layout. An operator declares a parameter as
a resource by annotating it with a class derived from `Resource`::

    class ProcessGroup(Resource):
        def __init__(self, group): self.key = ("gloo", 2)

    @operator("comm", "all_reduce", formats=("x",))
    def all_reduce(x: Tensor, group: ProcessGroup, out: Tensor | None = None) -> Tensor: ...

PyTorch's custom operators accept no such objects. They receive the resource's ``handle``, an integer, and `find` returns the live
resource. This module keeps only weak references. The owner of a resource must keep it alive as long as compiled code may use it.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Hashable, Mapping
from typing import Any, ClassVar, NoReturn, TypeVar

import torch

from tokenspeed_kernel_base.traits import TraitKind

R = TypeVar("R", bound="Resource")


class Resource:
    """Base class of resources.

    Attributes:
        key: part of the memo key of every call that is given the resource. Resources of one class with equal keys share decisions.
            So class and key must determine the resource's device, and everything that an operator's hooks ``check``, ``traits``,
            ``formats`` and ``fake`` read from the resource. Set ``key`` to a hashable value at construction, and never change it.
            ``key`` is an attribute instead of a property, because every call reads it.
        handle: the integer by which custom operators name this resource. Set at construction; never reused.
        device: the device that a call's tensors must be on; None for any device. A device without an index means any device of that
            type.
        trait_kinds: the traits that the method `traits` may return, with the values of each: ``{"rounded": bool}``. A derived class
            may add traits; declare kernels that constrain the added traits after the class.
        world_size: number of processes that take part in a call with the resource. If world_size is more than 1, all processes must
            make the same calls. No process may make extra calls, for example to measure.
    """

    key: Hashable = None
    handle: int
    device: torch.device | None = None
    trait_kinds: ClassVar[Mapping[str, TraitKind]] = {}
    world_size: int = 1

    def __new__(cls: type[R], *args: Any, **kwargs: Any) -> R:
        self = super().__new__(cls)
        # The handle is set here, because a dataclass replaces __init__. A frozen dataclass forbids assignment, so
        # object.__setattr__ sets it.
        object.__setattr__(self, "handle", next(_handles))
        _living[self.handle] = self
        return self

    @property
    def traits(self) -> Mapping[str, Any]:
        """Traits that the resource adds to a call's request, beside the traits of the operator's ``traits`` hook.

        Class and key must determine these traits. The traits describe the resource, so an override cannot bypass them. A kernel
        that does not constrain a trait whose value is True is rejected.
        """
        return {}

    @property
    def card(self) -> str:
        """One sentence about the resource for ``explain``; an empty text adds nothing."""
        return ""

    def converted(self: R, convert: Callable[[torch.Tensor], torch.Tensor]) -> R:
        """Returns a resource with the results of ``convert`` in place of its tensors; the resource itself if it has no tensors that
        could be replaced, such as buffers that other ranks know."""
        return self

    def __copy__(self: R) -> R:
        """Returns the resource itself, and so does `__deepcopy__`. So a copy of a call's arguments has the same resource."""
        return self

    def __deepcopy__(self: R, memo: dict[int, Any]) -> R:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} belongs to the process that made it, and cannot be pickled")


_handles = itertools.count(1)
_living: weakref.WeakValueDictionary[int, Resource] = weakref.WeakValueDictionary()


def stated_by(resource: Resource) -> Mapping[str, Any]:
    """The traits of a resource. Raises TypeError for a trait that the resource's class does not declare, because no kernel could
    constrain it."""
    traits = resource.traits
    for name in traits.keys() - resource.trait_kinds.keys():
        raise TypeError(f"a {type(resource).__name__} states the trait {name}, which trait_kinds of its class must declare")
    return traits


def find(handle: int) -> Resource:
    """Returns the resource that a handle names.

    Raises:
        RuntimeError: the resource does not exist: it was deleted, or the handle belongs to another process.
    """
    found = _living.get(handle)
    if found is None:
        raise RuntimeError(
            f"the resource of handle {handle} is gone, and a compiled function still uses it: keep a reference to each resource "
            "for as long as what was compiled with it is called, and compile again in another process"
        )
    return found


def same_place(wanted: torch.device, got: torch.device) -> bool:
    """Whether a tensor's device ``got`` matches a resource's device ``wanted``. Without an index, ``wanted`` matches all devices of
    its type."""
    return wanted.type == got.type and wanted.index in (None, got.index)
