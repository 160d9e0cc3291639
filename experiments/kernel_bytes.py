"""What a kernel reads and writes, in bytes: by Inductor's schedule, or by the call of an operator.

It is counted as if each byte were read and written once, and matrix products and attention not at all:
- a Triton kernel reads each element that it addresses once, and writes each once;
- a library call reads its inputs and writes its outputs; a look-up reads the rows that it takes;
- an operator of our own does the same. What it moves beside a product in it, WITH_PRODUCT says.
"""

import collections
import math

import torch
from torch._inductor import scheduler
from torch._inductor.dependencies import MemoryDep
from torch._inductor.ir import MultiOutput
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_scaled_mm"}
PRODUCTS |= {"counted::attention", "counted::attention_backward"}
# Our operators with a product in them: the arguments that they read beside its factors. Whatever they write
# is the product's result.
WITH_PRODUCT = {"nanochat::up_activated": (), "nanochat::down_activated_backward": ("z",)}
WITH_PRODUCT |= {"nanochat::add_product_": (), "nanochat::weight_gradient": ()}
LOOK_UPS = {"aten::embedding", "aten::index", "aten::index_select", "aten::gather"}
ONLY_WRITES = {"aten::copy_", "aten::zero_", "aten::fill_"}  # of operators that change their first argument
NO_KERNEL = {"aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided"}
NO_KERNEL |= {"aten::new_empty_strided", "aten::detach", "aten::lift_fresh"}


def kernel(operations: list[str], reads: dict[str, int], writes: dict[str, int], library: bool) -> dict:
    """The record of a launch: the operators in it, and bytes by the names of tensors."""
    return {"operations": operations, "reads": reads, "writes": writes, "library": library}


def operation_of(target) -> str:
    """An operator's name without its overload: mul, prims.convert_element_type, nanochat.head_and_loss."""
    if not isinstance(target, torch._ops.OpOverload):
        return getattr(target, "__name__", str(target))
    return target._schema.name.replace("::", ".").removeprefix("aten.")


# ------------------------------------------------------------------------------------------------------
# Calls of operators


def library_call(operator, args, kwargs, result) -> dict:
    """The record of a call."""
    return kernel([operation_of(operator)], *_moved_by_call(operator._schema, args, kwargs, result), True)


def _moved_by_call(schema, args, kwargs, result) -> tuple[dict[str, int], dict[str, int]]:
    given = dict(zip([argument.name for argument in schema.arguments], args, strict=False)) | kwargs
    sizes = {name: sum(map(_size, tensors_in(value))) for name, value in given.items()}
    if schema.name in PRODUCTS:
        return {}, {}
    if schema.name in WITH_PRODUCT:
        return {name: sizes[name] for name in WITH_PRODUCT[schema.name]}, {}
    changed = [a for a in schema.arguments if a.alias_info and a.alias_info.is_write and sizes.get(a.name)]
    only_written = [a.name for a in changed if a.kwarg_only or schema.name in ONLY_WRITES]  # or an `out`
    reads = {name: size for name, size in sizes.items() if size and name not in only_written}
    writes = {a.name: sizes[a.name] for a in changed}
    if not any(returned.alias_info for returned in schema.returns):
        writes |= {f"result{i}": _size(tensor) for i, tensor in enumerate(tensors_in(result))}
    if schema.name in LOOK_UPS:
        table = schema.arguments[0].name
        reads[table] = min(reads[table], sum(writes.values()))
    return reads, writes


def tensors_in(value) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _size(tensor) -> int:
    return tensor.numel() * tensor.element_size()


class Calls(TorchDispatchMode):
    """Records the calls that a function makes while this is active: in `kernels`, and in `compiled` the
    functions, with their arguments, that it would compile by `self.compile`."""

    def __init__(self):
        super().__init__()
        self.kernels, self.compiled, self.in_compiled = [], [], False

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result, schema = operator(*args, **(kwargs or {})), operator._schema
        is_view = any(r.alias_info and not r.alias_info.is_write for r in schema.returns)
        if not (self.in_compiled or is_view or schema.name in NO_KERNEL or schema.name.startswith("prim::")):
            self.kernels.append(library_call(operator, args, kwargs or {}, result))
        return result

    def compile(self, function):
        """In place of torch.compile."""

        def run(*args):
            self.compiled.append((function, args))
            self.in_compiled = True
            try:
                return function(*args)
            finally:
                self.in_compiled = False

        return run


# ------------------------------------------------------------------------------------------------------
# Inductor's schedule


def scheduled(graph, node) -> dict | None:
    """The record of what a node of the schedule launches; None: nothing. A call has its operator and its
    arguments, too."""
    if isinstance(node, scheduler.NopKernelSchedulerNode) or isinstance(node.node, MultiOutput):
        return None
    if not isinstance(node, scheduler.ExternKernelSchedulerNode):
        origins = {o for n in node.get_nodes() if n.node is not None for o in n.node.get_origins()}
        operations = sorted({operation_of(origin.target) for origin in origins})
        return kernel(operations, *_moved_by_kernel(graph, node), library=False)
    origin = node.node.get_origin_node()  # None if the operator has several results
    origin = origin or next(o for o in node.node.get_origins() if o.target is node.node.op_overload)
    args, kwargs, result = tree_map(
        lambda a: a.meta.get("val") if isinstance(a, torch.fx.Node) else a,
        (origin.args, origin.kwargs, origin),
    )
    call = library_call(origin.target, args, kwargs, result)
    return call | {"operator": origin.target._schema.name, "arguments": args}


def _ranges(dependency):
    return {name: ValueRanges(0, size - 1) for name, size in dependency.ranges.items()}


def _moved_by_kernel(graph, node) -> tuple[dict[str, int], dict[str, int]]:
    """Inductor's own count_bytes takes whole tensors where a kernel reads a part of them, and at most 1e9
    elements of each in a fused kernel, which is too few for logits. Dependencies other than MemoryDep only
    order the kernels."""
    inner = set(node.get_nodes())

    def made_here(name):
        made = graph.scheduler.name_to_buf.get(name)
        return made and made.defining_op in inner

    def stays_inside(name):  # a loop over a row leaves what the next loop needs in memory
        return made_here(name) and name in graph.removed_buffers | graph.inplaced_to_remove

    def sizes(dependencies):
        elements, seen = collections.Counter(), set()
        for d in dependencies:
            if not isinstance(d, MemoryDep) or stays_inside(d.name):
                continue
            number = int(math.prod(d.size) if d.is_indirect() else d.get_numel())
            # The same elements in another order, such as halves that change places, are read once
            found = d.name, number, d if d.is_indirect() else str(bound_sympy(d.index, _ranges(d)))
            if found not in seen:
                elements[d.name] += number
            seen.add(found)
        changed = graph.scheduler.mutation_real_name  # {a tensor after a change in place: its name before}
        whole = {name: int(graph.get_numel(changed.get(name, name))) for name in elements}
        return {name: min(n, whole[name]) * graph.get_dtype(name).itemsize for name, n in elements.items()}

    reads, writes = node.read_writes.reads, node.read_writes.writes
    added_to = {d for d in writes if getattr(d, "mode", None) == "atomic_add"}
    reads = {d for d in reads if not made_here(d.name)}  # from registers
    return sizes({*reads, *added_to}), sizes(writes)
