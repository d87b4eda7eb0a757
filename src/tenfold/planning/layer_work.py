"""The work of one layer on one rank, in the order of `nn.decoder.Block`: attention and feed-forward, with norms."""

from __future__ import annotations

from tenfold.nn.recompute import Mode
from tenfold.planning.feed_forward_work import feed_forward, mixture
from tenfold.planning.local import FP32
from tenfold.planning.passes import Builder, Conveyor, Item, Pass
from tenfold.planning.pieces_of_work import Making, memory
from tenfold.planning.terms import Collective, Operation


def layer_work(make: Making, mode: Mode, slice_number: int = 0) -> Pass:
    """A layer that recomputes by `mode`, of slice `slice_number` where sequences are in slices."""
    local, model = make.local, make.local.model
    build = Builder("layer")
    post, elements = model.norm_position == "post", local.own * model.hidden
    if not post:
        make.norm(build, "attention norm", elements)
    attention(make, build, slice_number)
    residual(make, build)
    make.norm(build, "attention norm" if post else "feed-forward norm", elements)
    if model.moe.experts:
        mixture(make, build)
    else:
        feed_forward(make, build, model.ffn, again=post)
    residual(make, build, again=post)
    if post:
        make.norm(build, "feed-forward norm", elements, again=False)
    return build.done(mode)


def residual(make: Making, build: Builder, *, again: bool = True) -> None:
    """What a part makes is added to its input; so are their gradients, for the norm before it."""
    add = memory("residual", make.local.own * make.local.model.hidden, 3 * make.item)
    build.step([add], [add], needed=again)


def attention(make: Making, build: Builder, slice_number: int) -> None:
    """Projections, rotary positions, scores and values."""
    local, model, item = make.local, make.local.model, make.item
    width, tokens = model.head_width, local.tokens
    queries, keys = local.heads * width, local.key_heads * width
    make.gather(build, "attention input", model.hidden)
    for name, columns in (("wq", queries), ("wk", keys), ("wv", keys)):
        make.linear(build, name, model.hidden, columns, widening=True, adds=name != "wv")
    if model.qk_norm:
        make.norm(build, "query norm", tokens * queries, "rmsnorm")
        make.norm(build, "key norm", tokens * keys, "rmsnorm")
    if model.positions == "rotary":
        # `nn.attention.rotate`: four products of halves, two sums, a concatenation, between two casts.
        casts = [FP32 + item] * 2 if item < FP32 else []
        forward, backward = [4, 4, 4, 4, 6, 6, 8, *casts], [4, 4, 4, 4, 4, 6, 6, 8, *casts]
        turned = tokens * (queries + keys)
        build.step([memory("rotary", turned, *forward)], [memory("rotary", turned, *backward)])
    scores(make, build, slice_number)
    make.linear(build, "wo", queries, model.hidden, widening=False)
    make.sum(build, "attention output", model.hidden)


def scores(make: Making, build: Builder, slice_number: int) -> None:
    """softmax(q k^T) v, of context ranks by a ring (`parallel.context`)."""
    local, model, item = make.local, make.local.model, make.item
    length, ranks = local.length, local.degrees.context
    heads, width = local.rows * local.heads, model.head_width
    seen: float = length if model.objective == "masked" else (length + 1) / 2
    queries, keys = local.positions, length
    if local.slices > 1:  # slices behind the first see a mask, and nothing of it is spared
        keys = queries * (slice_number + 1)
        seen = (queries + 1) / 2 if slice_number == 0 else keys
    flops = 4.0 * heads * queries * width * seen
    if local.slices > 1:
        kept = 2 * local.rows * local.key_heads * queries * width
        build.step([memory("keys kept", kept, 2 * item)], [memory("keys kept", kept, 3 * item)])

    def of(part: float, way: str) -> Operation:
        forward = way == "forward"
        return Operation(
            "attention",
            "attention",
            flops=flops * part * (1 if forward else 2),
            rows=queries,
            inner=width,
            columns=round(keys * part),
            groups=heads,
            way="forward" if forward else "input",
        )

    if ranks == 1:
        build.step([of(1, "forward")], [of(1, "input")])
        return
    # Every pair of ranks has the same to do; while it is done the next keys and values come, and in the backward pass
    # gradients of those before go on.
    block = 2 * local.rows * local.key_heads * local.positions * width
    comes = Collective("keys and values", "send", "context", block * item)
    leaves = Collective("gradients of keys and values", "send", "context", block * FP32)
    wide = local.rows * local.heads * local.positions * width
    merge = memory("blocks merged", wide, item + FP32, 3 * FP32)
    adds = memory("gradients of blocks", wide + block, item + FP32, 3 * FP32)
    part, pack = 1 / ranks, memory("keys and values", block, 2 * item)
    there, back = (of(part, "forward"), merge), (of(part, "input"), adds)
    build.step(
        [pack, Conveyor(ranks - 1, (comes,), there, before=there)],
        [pack, Conveyor(ranks - 1, (comes,), back, (leaves,), before=back)],
        kept=True,
    )


def embedding_work(make: Making, slice_number: int = 0) -> Pass:
    """From tokens to the hidden states before the first layer (`Decoder._embed`)."""
    local, model, item = make.local, make.local.model, make.item
    build, width = Builder("embedding"), model.embedding_columns
    side = local.degrees.rows
    # Tensor ranks look all tokens up; of a grid all sequences, and a part of the columns.
    looked = local.sequences * local.positions * -(-width // side) if make.split else local.own * width
    table = local.vocabulary * -(-width // side)
    gradient: list[Item] = [memory("embedding gradient", table, FP32), memory("embedding gradient", looked, 3 * FP32)]
    if make.adds:
        gradient.append(memory("embedding gradient added", table * make.adds, 3 * FP32))
    masks = [memory("rows of others", looked, 2 * FP32)] if make.split else []
    build.step([memory("embedding", looked, 2 * FP32), *masks], [], [*masks, *gradient])
    if make.split:
        rows = local.sequences * local.positions
        exchange = [
            Collective("embedding", kind, make.axis, rows * -(-width // side) * FP32)
            for kind in ("all_gather", "reduce_scatter")
        ]
        build.step(exchange[1:], exchange[:1])
    if side > 1:
        swapped = Collective("embedding", "all_to_all", "column", local.own * width * FP32)
        build.step([swapped, memory("embedding joined", local.own * width, 2 * FP32)], [swapped])
    if model.positions == "learned":
        add = memory("positions", local.own * width, 3 * FP32)
        build.step([add], [memory("positions", local.own * width, FP32)])
    if item < FP32:
        cast = memory("embedding cast", local.own * width, FP32 + item)
        build.step([cast], [cast])
    if model.embedding_norm:
        make.norm(build, "embedding norm", local.own * width)
    if model.embedding_width is not None:
        make.product(build, "projection", local.own, width, model.hidden, bias=model.bias)
    return build.done()


def head_work(make: Making, slice_number: int = 0) -> Pass:
    """From the last layer's hidden states to the loss, which makes its own gradients in the forward pass."""
    local, model, item = make.local, make.local.model, make.item
    build, width, rows = Builder("head"), model.embedding_columns, local.vocabulary
    masked = model.objective == "masked"
    if model.norm_position == "pre":
        make.norm(build, "final norm", local.own * model.hidden)
    if masked or model.embedding_width is not None:
        # Alone, an encoder makes it at masked places only.
        tokens = local.own if local.degrees.columns * local.degrees.context > 1 else predicted(make)
        make.product(build, "transform", tokens, model.hidden, width, bias=masked or model.bias)
        if masked:
            build.step(
                [memory("activation", tokens * width, 2 * item)], [memory("activation", tokens * width, 3 * item)]
            )
            make.norm(build, "transform norm", tokens * width)
    make.gather(build, "head input", width)
    tokens = predicted(make)
    side = local.degrees.rows
    joined = Collective("output matrix", "all_gather", "column", rows * -(-width // side) * side * FP32)
    if side > 1:
        back = Collective("output matrix gradient", "reduce_scatter", "column", joined.bytes)
        build.step([joined, memory("output matrix", rows * width, 2 * FP32)], [], [back])
    chunks = max(1, -(-tokens // local.loss_chunk))
    mean, logits = tokens / chunks, tokens / chunks * rows
    casts = item < FP32
    forward: list[Item] = [memory("output matrix cast", rows * width, FP32 + item)] if casts else []
    forward.append(memory("output matrix gradient", rows * width, FP32))
    chunk: list[Operation | Collective] = [
        Operation("logits", "matrix", 2.0 * logits * width, rows=round(mean), inner=width, columns=rows),
        memory("softmax", logits, *([FP32 + item] if casts else []), FP32, 2 * FP32, 2 * FP32, FP32),
    ]
    if model.objective == "masked":
        chunk.append(memory("output bias", logits, 2 * FP32, item))
    if make.split:
        chunk.append(Collective("largest logits", "all_reduce", make.axis, mean * FP32))
        chunk.append(Collective("sums of logits", "all_reduce", make.axis, 2 * mean * FP32))
    chunk += [
        memory("softmax backward", logits, 2 * FP32, *([FP32 + item] if casts else [])),
        Operation("logits", "matrix", 2.0 * logits * width, rows=round(mean), inner=rows, columns=width, way="input"),
        Operation("logits", "matrix", 2.0 * logits * width, rows=rows, inner=round(mean), columns=width, way="weight"),
    ]
    if casts:
        chunk.append(memory("output matrix gradient added", rows * width, 2 * FP32 + item))
    forward.append(Conveyor(chunks, (), tuple(chunk)))
    backward: list[Item] = [memory("loss gradient", tokens * width, 2 * item)]
    gradient: list[Item] = [memory("output matrix gradient", rows * width, 2 * FP32)]
    if make.adds or model.tie_embeddings:
        gradient.append(memory("output matrix gradient added", rows * width, 3 * FP32))
    build.step(forward, backward, gradient)
    return build.done()


def predicted(make: Making) -> int:
    """Tokens of a pass whose logits a rank makes."""
    local = make.local
    if local.model.objective != "masked":
        return local.tokens
    return local.rows * max(1, round(local.model.mask_share * local.length)) // local.degrees.context
