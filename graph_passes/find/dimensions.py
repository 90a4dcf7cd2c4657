"""Infers the shapes and element types of a graph's values, and the integers that shapes are computed from.

Exports write `x.view(batch, length, heads, -1)` as a chain of Shape, Gather, Concat and Reshape. This module evaluates
such chains symbolically: a dimension is an int, or a symbol that equals only itself. onnx's shape inference does not
follow such chains, and lacks the operators of ONNX Runtime and of Ortolan; it is used for the remaining nodes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import onnx_ir as ir

from .constants import DEFAULT_DOMAINS, GRAPHS, constant_tensor
from .shape_inference import SymbolicInference, opset_of
from .sums import Dim, Element, Product, Shape, Sum, compute, cut, difference, named, product_of, quotient, total_of

_MOST_ELEMENTS = 16
_NAMES = """
same: Identity Cast Relu Gelu Erf Tanh Sigmoid Sqrt Softmax LogSoftmax LayerNormalization RMSNormalization Dropout Neg
    Exp Abs Not IsNaN IsInf Clip Round Swish Elu LeakyRelu HardSwish Softplus Reciprocal Floor Ceil Log Sin Cos CumSum
    Trilu SimplifiedLayerNormalization SkipLayerNormalization SkipSimplifiedLayerNormalization BiasGelu FastGelu
    QuickGelu QuantizeLinear DequantizeLinear ScatterND ScatterElements RotaryEmbedding
broadcast: Add Sub Mul Div Pow Where And Or Xor Equal Less LessOrEqual Greater GreaterOrEqual Min Max Mod
boolean: And Or Xor Not Equal Less LessOrEqual Greater GreaterOrEqual IsNaN IsInf
"""
_SAME, _BROADCAST, _BOOLEAN = (frozenset(part.split()) for part in re.split(r"\w+:", _NAMES)[1:])
_CONTRIB = ("com.microsoft", "ai.ortolan")
_RESIDUAL_INPUT = {"SparseAMXMatMul": 5, "VNNISpMM": 6, "W4A8MatMul": 4, "W8A8MatMul": 4}  # index of the residual input


class Dimensions:
    """Shapes, element types and small constants of one graph's values."""

    def __init__(self, graph: ir.Graph, around: Dimensions | None = None) -> None:
        """around: dimensions of the outer graph if `graph` is a branch; None: outer values have declared shapes."""
        self._around = around
        self._shapes: dict[ir.Value, Shape] = {}
        self._elements: dict[ir.Value, tuple[Element, ...]] = {}
        self._types: dict[ir.Value, ir.DataType] = {}
        self._inference = SymbolicInference(opset_of(graph))
        for node in graph:
            for output in node.outputs if node.op_type == "Split" else node.outputs[:1]:
                self._visit(node, output)

    def shape(self, value: ir.Value | None) -> Shape | None:
        """Return the dimensions of a value, or None if its rank is unknown."""
        if value is None:
            return None
        if value in self._shapes:
            return self._shapes[value]
        tensor = constant_tensor(value)
        if tensor is not None:
            return tuple(tensor.shape.numpy())
        return _declared(value) if self._around is None else self._around.shape(value)

    def elements(self, value: ir.Value | None) -> tuple[Element, ...] | None:
        """Return the elements of a short vector or scalar, some of them None; None if their count is unknown."""
        if value is None or value in self._elements:
            return self._elements[value] if value is not None else None
        tensor = constant_tensor(value)
        if tensor is None and self._around is not None:
            return self._around.elements(value)
        if tensor is None or len(tensor.shape) > 1 or tensor.size > _MOST_ELEMENTS:
            return None
        if tensor.dtype not in (ir.DataType.INT64, ir.DataType.INT32, ir.DataType.FLOAT, ir.DataType.DOUBLE):
            return None
        return tuple(tensor.numpy().reshape(-1).tolist())

    def number(self, value: ir.Value | None) -> float | None:
        """Return the constant value of a scalar or one-element vector, or None."""
        elements, shape = self.elements(value), self.shape(value)
        if elements is None or len(elements) != 1 or not isinstance(elements[0], int | float):
            return None
        return float(elements[0]) if shape in ((), (1,)) else None

    def dtype(self, value: ir.Value | None) -> ir.DataType | None:
        """Return a value's element type, if known."""
        if value is None or value in self._types:
            return self._types[value] if value is not None else None
        tensor = constant_tensor(value)
        return tensor.dtype if tensor is not None else value.dtype

    def _visit(self, node: ir.Node, output: ir.Value) -> None:
        known = node.domain in (*DEFAULT_DOMAINS, *_CONTRIB)
        shape = self._shape_of(node, output) if known else None
        if shape is None and node.domain in DEFAULT_DOMAINS:
            shape = self._infer(node, output)
        declared = _declared(output)
        if shape is None:
            shape = declared
        elif declared is not None and len(declared) == len(shape):
            pairs = zip(shape, declared, strict=True)
            shape = tuple(stated if isinstance(stated, int) and _is_unknown(dim) else dim for dim, stated in pairs)
        if shape is not None:
            self._shapes[output] = shape
        dtype = self._type_of(node) if known else output.dtype
        if dtype is not None:
            self._types[output] = dtype
        if node.domain in DEFAULT_DOMAINS:
            compute = _ELEMENTS.get(node.op_type)
            elements = compute(self, node) if compute else None
            flat = len(shape or ()) < 2  # only scalars and vectors are shapes or dimensions
            if flat and elements is not None and len(elements) <= _MOST_ELEMENTS:
                self._elements[output] = elements

    def _type_of(self, node: ir.Node) -> ir.DataType | None:
        if node.op_type in ("Cast", "ConstantOfShape"):
            if "to" in node.attributes:
                return ir.DataType(node.attributes["to"].as_int())
            return node.attributes["value"].as_tensor().dtype if "value" in node.attributes else ir.DataType.FLOAT
        if node.op_type in _BOOLEAN:
            return ir.DataType.BOOL
        if node.op_type in ("Shape", "Size", "NonZero", "ArgMax", "ArgMin"):
            return ir.DataType.INT64
        if any(attribute.type in GRAPHS for attribute in node.attributes.values()):
            return node.outputs[0].dtype
        if node.op_type in ("Where", "DequantizeLinear"):
            return self.dtype(node.inputs[1])
        if node.op_type == "QuantizeLinear":
            return self.dtype(node.inputs[2]) if len(node.inputs) > 2 else node.outputs[0].dtype
        if node.op_type == "DynamicQuantizeLinear":
            return ir.DataType.UINT8
        if node.op_type in ("MatMulIntegerToFloat", "QAttention"):
            return ir.DataType.FLOAT
        if node.op_type == "EmbedLayerNormalization":
            return self.dtype(node.inputs[2])
        if node.op_type == "QEmbedLayerNormalization":
            return ir.DataType.FLOAT
        types = (self.dtype(value) for value in node.inputs)
        return node.outputs[0].dtype or next((dtype for dtype in types if dtype is not None), None)

    def _infer(self, node: ir.Node, output: ir.Value) -> Shape | None:
        """Return the output's shape by onnx's inference, and set the shapes of the node's other outputs."""
        if any(attribute.type in GRAPHS for attribute in node.attributes.values()):
            return None
        shapes, types = [self.shape(value) for value in node.inputs], [self.dtype(value) for value in node.inputs]
        constants = [constant_tensor(value) for value in node.inputs]
        found = self._inference.outputs(node, shapes, types, constants, _fresh)
        for other in node.outputs[1:]:
            if other in found:
                self._shapes[other] = found[other]
        return found.get(output)

    def _shape_of(self, node: ir.Node, output: ir.Value) -> Shape | None:
        if node.op_type in _SAME:
            return self.shape(node.inputs[0])
        if node.op_type in _BROADCAST:
            return self._broadcast(node.inputs, output)
        compute = _SHAPES.get(node.op_type)
        return compute(self, node, output) if compute else None

    def _broadcast(self, values: Sequence[ir.Value | None], output: ir.Value) -> Shape | None:
        return broadcast([self.shape(value) for value in values], output)

    def _add_layer_norm(self, node: ir.Node, output: ir.Value) -> Shape | None:
        return self._broadcast(node.inputs[:3], output)

    def _matmul(self, node: ir.Node, output: ir.Value) -> Shape | None:
        a, b = self.shape(node.inputs[0]), self.shape(node.inputs[1])
        if a is None or b is None or len(a) < 2 or len(b) < 2:
            return None
        batch = broadcast([a[:-2], b[:-2]], output)
        return None if batch is None else (*batch, a[-2], b[-1])

    def _gemm(self, node: ir.Node, _: ir.Value) -> Shape | None:
        a, b = self.shape(node.inputs[0]), self.shape(node.inputs[1])
        if a is None or b is None or len(a) != 2 or len(b) != 2:
            return None
        return a[int_attribute(node, "transA", 0)], b[1 - int_attribute(node, "transB", 0)]

    def _linear(self, node: ir.Node, output: ir.Value) -> Shape | None:
        """Return the output shape of a linear layer's operator whose output width is an attribute."""
        x = self.shape(node.inputs[0])
        width = int_attribute(node, "gated_columns", 0) or int_attribute(node, "n", 0) or int_attribute(node, "N", 0)
        if x is None or not width:
            return None
        place = _RESIDUAL_INPUT.get(node.op_type, 0)
        residual = node.inputs[place : place + 1]
        if node.domain != "ai.ortolan" or not residual or residual[0] is None:
            return *x[:-1], width
        return broadcast([(*x[:-1], width), self.shape(residual[0])], output)

    def _attention(self, node: ir.Node, _: ir.Value) -> Shape | None:
        """Return the output shape of NoMADAttention and MultiHeadAttention; its width is that of the queries."""
        query = self.shape(node.inputs[0])
        key = node.inputs[2] if len(node.inputs) > 2 else None
        ours = node.domain == "ai.ortolan"
        if ours and query is not None and len(query) == 4:
            heads, head_dim = query[1], query[3]
            return (
                (query[0], query[2], heads * head_dim) if isinstance(heads, int) and isinstance(head_dim, int) else None
            )
        if query is None or len(query) != 3:
            return None
        if key is not None and not (ours and self.shape(key) == (1,)):
            return query
        if not ours or not isinstance(query[2], int):
            return None
        heads = int_attribute(node, "num_heads", 1)
        return *query[:2], query[2] * heads // (heads + 2 * (int_attribute(node, "kv_num_heads", 0) or heads))

    def _onnx_attention(self, node: ir.Node, output: ir.Value) -> Shape | None:
        if node.domain not in DEFAULT_DOMAINS:
            return self._packed_attention(node, output)
        query, value = self.shape(node.inputs[0]), self.shape(node.inputs[2])
        if query is None or value is None:
            return None
        if len(query) == 4:
            return *query[:3], value[3]
        heads, kv_heads = (int_attribute(node, name, 0) for name in ("q_num_heads", "kv_num_heads"))
        width = value[2]
        return (*query[:2], heads * width // kv_heads) if isinstance(width, int) and kv_heads else None

    def _packed_attention(self, node: ir.Node, _: ir.Value) -> Shape | None:
        """Return the output shape of ONNX Runtime's Attention and QAttention, which include the QKV projection."""
        x, weight = self.shape(node.inputs[0]), self.shape(node.inputs[1])
        if x is None or weight is None or len(x) != 3 or not isinstance(weight[-1], int):
            return None
        sizes = node.attributes["qkv_hidden_sizes"].as_ints() if "qkv_hidden_sizes" in node.attributes else ()
        return *x[:2], sizes[-1] if sizes else weight[-1] // 3

    def _transpose(self, node: ir.Node, _: ir.Value) -> Shape | None:
        shape = self.shape(node.inputs[0])
        if shape is None:
            return None
        return tuple(shape[axis] for axis in permutation(node, len(shape)))

    def _reshape(self, node: ir.Node, output: ir.Value) -> Shape | None:
        shape, target = self.shape(node.inputs[0]), self.reshape_target(node)
        if target is None:
            return None
        dims = [_fresh(output, axis) if dim in (None, -1) else dim for axis, dim in enumerate(target)]
        if shape is not None and sum(dim in (None, -1) for dim in target) == 1:
            unknown = next(axis for axis, dim in enumerate(target) if dim in (None, -1))
            rest = quotient(shape, [dim for axis, dim in enumerate(dims) if axis != unknown])
            dims[unknown] = dims[unknown] if rest is None else rest
        return tuple(dims)

    def reshape_target(self, node: ir.Node) -> tuple[Dim | None, ...] | None:
        """Return the target of a Reshape with zeros replaced by input dimensions; -1 and None remain unknown."""
        shape, target = self.shape(node.inputs[0]), self.elements(node.inputs[1])
        if target is None:
            return None
        if int_attribute(node, "allowzero", 0):
            return target
        if 0 in target and shape is None:
            return None
        return tuple(shape[axis] if dim == 0 and shape is not None else dim for axis, dim in enumerate(target))

    def _reduce(self, node: ir.Node, _: ir.Value) -> Shape | None:
        shape = self.shape(node.inputs[0])
        axes: Sequence[Element] | None = ()
        if "axes" in node.attributes:
            axes = tuple(node.attributes["axes"].as_ints())
        elif len(node.inputs) > 1 and node.inputs[1] is not None:
            axes = self.elements(node.inputs[1])
        if not shape or not axes or not all(isinstance(axis, int) for axis in axes):
            return None
        gone = {axis % len(shape) for axis in axes if isinstance(axis, int)}
        if int_attribute(node, "keepdims", 1):
            return tuple(1 if axis in gone else dim for axis, dim in enumerate(shape))
        return tuple(dim for axis, dim in enumerate(shape) if axis not in gone)

    def _unsqueeze(self, node: ir.Node, _: ir.Value) -> Shape | None:
        shape, axes = self.shape(node.inputs[0]), self.elements(node.inputs[1])
        if shape is None or axes is None or not all(isinstance(axis, int) for axis in axes):
            return None
        rank = len(shape) + len(axes)
        new = {axis % rank for axis in axes if isinstance(axis, int)}
        left = iter(shape)
        return tuple(1 if axis in new else next(left) for axis in range(rank))

    def _squeeze(self, node: ir.Node, _: ir.Value) -> Shape | None:
        shape = self.shape(node.inputs[0])
        axes = self.elements(node.inputs[1]) if len(node.inputs) > 1 and node.inputs[1] is not None else ()
        if not shape or axes is None or not all(isinstance(axis, int) for axis in axes):
            return None
        gone = {axis % len(shape) for axis in axes if isinstance(axis, int)}
        if not gone and all(isinstance(dim, int) for dim in shape):  # without axes, Squeeze removes all dimensions of 1
            gone = {axis for axis, dim in enumerate(shape) if dim == 1}
        return tuple(dim for axis, dim in enumerate(shape) if axis not in gone) if gone else None

    def _gather(self, node: ir.Node, _: ir.Value) -> Shape | None:
        data, indices = self.shape(node.inputs[0]), self.shape(node.inputs[1])
        if not data or indices is None:
            return None
        axis = int_attribute(node, "axis", 0) % len(data)
        return *data[:axis], *indices, *data[axis + 1 :]

    def _expand(self, node: ir.Node, output: ir.Value) -> Shape | None:
        target = self.elements(node.inputs[1])
        if target is None:
            return None
        dims = tuple(_fresh(output, axis) if dim is None else dim for axis, dim in enumerate(target))
        return broadcast([self.shape(node.inputs[0]), dims], output)

    def _slice(self, node: ir.Node, output: ir.Value) -> Shape | None:
        shape, elements = self.shape(node.inputs[0]), self._slice_elements(node)
        if elements is not None:
            return (len(elements),)
        starts, ends, axes, steps = (self.elements(value) for value in [*node.inputs[1:], None, None][:4])
        given = self.shape(node.inputs[1])
        if axes is None and len(node.inputs) < 4 and given is not None and isinstance(given[0], int):
            axes = tuple(range(given[0]))
        if shape is None or axes is None:
            return None
        dims = list(shape)
        for place, axis in enumerate(axes):
            if not isinstance(axis, int):
                return None
            begin, end = (one[place] if one is not None else None for one in (starts, ends))
            step = 1 if len(node.inputs) < 5 else steps[place] if steps is not None else None
            length = cut(dims[axis], begin, end, step)
            dims[axis] = _fresh(output, axis % len(shape)) if length is None else length
        return tuple(dims)

    def _if(self, node: ir.Node, output: ir.Value) -> Shape | None:
        """Return the shape that both branches have, or the shape of the branch that is always taken."""
        place = node.outputs.index(output)
        branches = [node.attributes[name].as_graph() for name in ("then_branch", "else_branch")]
        condition = self.elements(node.inputs[0])
        if condition is not None and isinstance(condition[0], bool):
            branches = [branches[0 if condition[0] else 1]]
        shapes = [Dimensions(branch, self).shape(branch.outputs[place]) for branch in branches]
        first, last = shapes[0], shapes[-1]
        if first is None or last is None or len(first) != len(last):
            return None
        pairs = enumerate(zip(first, last, strict=True))
        return tuple(one if one == other else _fresh(output, axis) for axis, (one, other) in pairs)

    def _tile(self, node: ir.Node, output: ir.Value) -> Shape | None:
        shape, times = self.shape(node.inputs[0]), self.elements(node.inputs[1])
        if shape is None or times is None or len(shape) != len(times):
            return None
        products = [
            dim * count if isinstance(dim, int) and isinstance(count, int) else product_of(dim, count)
            for dim, count in zip(shape, times, strict=True)
        ]
        return tuple(_fresh(output, axis) if dim is None else dim for axis, dim in enumerate(products))

    def _indices(self, node: ir.Node, _: ir.Value) -> Shape | None:
        return self.shape(node.inputs[1])

    def _split(self, node: ir.Node, output: ir.Value) -> Shape | None:
        shape = self.shape(node.inputs[0])
        sizes = self.elements(node.inputs[1]) if len(node.inputs) > 1 else None
        if not shape:
            return None
        axis, place = int_attribute(node, "axis", 0) % len(shape), output.index() or 0
        width = shape[axis]
        if sizes is None and len(node.inputs) < 2 and isinstance(width, int):
            chunk = -(-width // len(node.outputs))
            sizes = tuple(min(chunk, width - chunk * part) for part in range(len(node.outputs)))
        size = sizes[place] if sizes is not None and place < len(sizes) else None
        return *shape[:axis], _fresh(output, axis) if size is None else size, *shape[axis + 1 :]

    def _constant_of_shape(self, node: ir.Node, output: ir.Value) -> Shape | None:
        target = self.elements(node.inputs[0])
        if target is None:
            return None
        return tuple(_fresh(output, axis) if dim is None else dim for axis, dim in enumerate(target))

    def _range(self, node: ir.Node, output: ir.Value) -> Shape | None:
        start, limit, step = (self.elements(value) for value in node.inputs)
        if start is None or limit is None or step != (1,):
            return (_fresh(output, 0),)
        count = difference(limit[0], start[0])
        return (_fresh(output, 0) if count is None else max(0, count) if isinstance(count, int) else count,)

    def _concat(self, node: ir.Node, output: ir.Value) -> Shape | None:
        elements = self._concat_elements(node)
        if elements is not None:
            return (len(elements),)
        shapes = [self.shape(value) for value in node.inputs]
        if None in shapes or len({len(shape) for shape in shapes if shape is not None}) != 1:
            return None
        dims: list[Dim] = []
        for place, parts in enumerate(zip(*(shape for shape in shapes if shape is not None), strict=True)):
            numbers = [dim for dim in parts if isinstance(dim, int)]
            if place == int_attribute(node, "axis", 0) % len(shapes[0] or ()):
                total = total_of(parts)
                dims.append(_fresh(output, place) if total is None else total)
            else:  # Concat requires equal dimensions, even under different names
                dims.append(numbers[0] if numbers else parts[0])
        return tuple(dims)

    def _shape_shape(self, node: ir.Node, _: ir.Value) -> Shape | None:
        elements = self._shape_elements(node)
        return None if elements is None else (len(elements),)

    def _dynamic_quantize(self, node: ir.Node, _: ir.Value) -> Shape | None:
        for output, dtype in zip(node.outputs[1:], (ir.DataType.FLOAT, ir.DataType.UINT8), strict=False):
            self._shapes[output], self._types[output] = (), dtype
        return self.shape(node.inputs[0])

    def _embed(self, node: ir.Node, _: ir.Value) -> Shape | None:
        ids, table = self.shape(node.inputs[0]), self.shape(node.inputs[2])
        if ids is None or table is None:
            return None
        if len(node.outputs) > 1:  # the length of each sequence
            self._shapes[node.outputs[1]], self._types[node.outputs[1]] = ids[:1], ir.DataType.INT32
        return *ids, table[-1]

    # ---- integers that shapes are computed from ----------------------------------------------------------------------

    def _shape_elements(self, node: ir.Node) -> tuple[Element, ...] | None:
        shape = self.shape(node.inputs[0])
        if shape is None:
            return None
        end = node.attributes["end"].as_int() if "end" in node.attributes else None
        return shape[int_attribute(node, "start", 0) : end]

    def _same_elements(self, node: ir.Node) -> tuple[Element, ...] | None:
        """Return the input's elements, for Identity, Cast, Squeeze, Unsqueeze and Reshape of scalars and vectors."""
        elements = self.elements(node.inputs[0])
        if elements is None or node.op_type != "Cast":
            return elements
        floats = ir.DataType(node.attributes["to"].as_int()).is_floating_point()
        return tuple(float(one) if isinstance(one, int) and floats else one for one in elements)

    def _gather_elements(self, node: ir.Node) -> tuple[Element, ...] | None:
        data, indices = self.elements(node.inputs[0]), self.elements(node.inputs[1])
        if data is None or indices is None:
            return None
        inside = all(isinstance(index, int) and -len(data) <= index < len(data) for index in indices)
        return tuple(data[index] for index in indices if isinstance(index, int)) if inside else None

    def _slice_elements(self, node: ir.Node) -> tuple[Element, ...] | None:
        data = self.elements(node.inputs[0])
        bounds = [self.number(value) for index, value in enumerate(node.inputs) if index in (1, 2, 4)]
        if data is None or None in bounds:
            return None
        return data[slice(*(int(bound) for bound in bounds if bound is not None))]

    def _concat_elements(self, node: ir.Node) -> tuple[Element, ...] | None:
        parts = [self.elements(value) for value in node.inputs]
        return None if None in parts else tuple(one for part in parts if part is not None for one in part)

    def _constant_of_shape_elements(self, node: ir.Node) -> tuple[Element, ...] | None:
        counts = self.elements(node.inputs[0])
        count = counts[0] if counts is not None and len(counts) == 1 else None
        if not isinstance(count, int) or count > _MOST_ELEMENTS:
            return None
        value = node.attributes["value"].as_tensor().numpy().item() if "value" in node.attributes else 0.0
        return (value,) * count

    def _arithmetic(self, node: ir.Node) -> tuple[Element, ...] | None:
        operands = [self.elements(value) for value in node.inputs]
        lengths = {len(operand) for operand in operands if operand is not None}
        if None in operands or len(lengths - {1}) > 1:
            return None
        count = max(lengths)
        columns = [operand * (count // len(operand)) for operand in operands if operand]
        return tuple(compute(node.op_type, row) for row in zip(*columns, strict=True))


_SHAPES: dict[str, Callable[[Dimensions, ir.Node, ir.Value], Shape | None]] = {
    **dict.fromkeys(("MatMul", "MatMulIntegerToFloat", "DynamicQuantizeMatMul"), Dimensions._matmul),
    "Gemm": Dimensions._gemm,
    "MatMulNBits": Dimensions._linear,
    "W4A8MatMul": Dimensions._linear,
    "W8A8MatMul": Dimensions._linear,
    "SparseAMXMatMul": Dimensions._linear,
    "VNNISpMM": Dimensions._linear,
    "MaskedMatMul": Dimensions._matmul,
    "AddLayerNorm": Dimensions._add_layer_norm,
    "NoMADAttention": Dimensions._attention,
    "MultiHeadAttention": Dimensions._attention,
    "Attention": Dimensions._onnx_attention,
    "QAttention": Dimensions._packed_attention,
    "Transpose": Dimensions._transpose,
    "Reshape": Dimensions._reshape,
    **dict.fromkeys(("ReduceMean", "ReduceSum", "ReduceMax", "ReduceL2"), Dimensions._reduce),
    "Unsqueeze": Dimensions._unsqueeze,
    "Squeeze": Dimensions._squeeze,
    "Gather": Dimensions._gather,
    "Slice": Dimensions._slice,
    "Split": Dimensions._split,
    "Tile": Dimensions._tile,
    "If": Dimensions._if,
    "GatherElements": Dimensions._indices,
    "Expand": Dimensions._expand,
    "ConstantOfShape": Dimensions._constant_of_shape,
    "Range": Dimensions._range,
    "Shape": Dimensions._shape_shape,
    "Concat": Dimensions._concat,
    "EmbedLayerNormalization": Dimensions._embed,
    "QEmbedLayerNormalization": Dimensions._embed,
    "DynamicQuantizeLinear": Dimensions._dynamic_quantize,
}
_ELEMENTS: dict[str, Callable[[Dimensions, ir.Node], tuple[Element, ...] | None]] = {
    "Shape": Dimensions._shape_elements,
    **dict.fromkeys(("Identity", "Cast", "Unsqueeze", "Squeeze", "Reshape"), Dimensions._same_elements),
    "Gather": Dimensions._gather_elements,
    "Slice": Dimensions._slice_elements,
    "Concat": Dimensions._concat_elements,
    "ConstantOfShape": Dimensions._constant_of_shape_elements,
    **dict.fromkeys(
        ("Add", "Sub", "Mul", "Div", "Sqrt", "Reciprocal", "Where", "Equal", "Not"), Dimensions._arithmetic
    ),
}


def broadcast(shapes: Sequence[Shape | None], output: ir.Value) -> Shape | None:
    """Return the broadcast shape; two different symbols on one axis give a new symbol."""
    if None in shapes:
        return None
    rank = max(len(shape) for shape in shapes if shape is not None)
    aligned = [(1,) * (rank - len(shape)) + shape for shape in shapes if shape is not None]
    result: list[Dim] = []
    for axis, dims in enumerate(zip(*aligned, strict=True)):
        different = {dim for dim in dims if dim != 1}
        numbers = [dim for dim in different if isinstance(dim, int)]
        if len(different) <= 1:
            result.append(next(iter(different), 1))
        else:
            result.append(numbers[0] if numbers else _fresh(output, axis))
    return tuple(result)


def permutation(node: ir.Node, rank: int) -> tuple[int, ...]:
    """Return the permutation of a Transpose."""
    return tuple(node.attributes["perm"].as_ints()) if "perm" in node.attributes else tuple(reversed(range(rank)))


def int_attribute(node: ir.Node, name: str, default: int) -> int:
    """Return an integer attribute, or the default."""
    return node.attributes[name].as_int() if name in node.attributes else default


def _fresh(value: ir.Value, axis: int) -> Dim:
    return value, axis


def _is_unknown(dim: Dim) -> bool:
    """Return whether a dimension is computed: neither an integer nor the name of an input's dimension."""
    return isinstance(dim, tuple | Sum | Product)


def _declared(value: ir.Value) -> Shape | None:
    if value.shape is None:
        return None
    # Names of dimensions are reliable only at the model's inputs; the name of a Loop body's input describes only the
    # first iteration. Only the main graph imports opsets.
    is_input = value.is_graph_input() and value.graph is not None and bool(value.graph.opset_imports)
    dims: list[Dim] = []
    for axis, dim in enumerate(value.shape):
        name = named(dim.value or "") if not isinstance(dim, int) and is_input else None
        dims.append(dim if isinstance(dim, int) else _fresh(value, axis) if name is None else name)
    return tuple(dims)


def head_size(value: ir.Value) -> int | None:
    """Return the head width of a cache whose shape does not state it, as in models of new ONNX Runtime GenAI builders.

    It is computed from the width of the queries, or from that of the packed queries, keys and values.
    """
    for node, _ in value.uses():
        if node.op_type != "GroupQueryAttention" or not node.inputs or node.inputs[0] is None:
            continue
        counts = [node.attributes[name].as_int() for name in ("num_heads", "kv_num_heads") if name in node.attributes]
        width = _width(node.inputs[0])
        if len(counts) == 2 and width is not None:
            packed = all(source is None for source in node.inputs[1:3])
            heads = counts[0] + (2 * counts[1] if packed else 0)
            return width // heads if heads > 0 else None
    return None


def _width(value: ir.Value) -> int | None:
    """Return the last dimension of a value: declared, or that of the weight or bias it is computed with."""
    node = value.producer()
    if value.shape is not None and len(value.shape) and isinstance(value.shape[-1], int):
        return value.shape[-1]
    if node is None:
        return None
    if "N" in node.attributes:  # MatMulNBits
        return node.attributes["N"].as_int()
    constants = [constant_tensor(source) for source in node.inputs] if node.op_type in ("MatMul", "Add") else []
    return next((tensor.shape.numpy()[-1] for tensor in constants if tensor is not None and len(tensor.shape)), None)
