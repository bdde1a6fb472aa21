"""What the compiled kernels and those who call them agree on. It knows neither numba nor ctypes.

Every kernel is `int64 name(int64 *numbers, float *factors)`: addresses and sizes in the order that is listed here.
"""

from __future__ import annotations

F32, BF16, INT8 = KINDS = (0, 1, 2)
"""Kinds of weights. INT8 weights are multiplied by one float32 for each output."""

WEIGHT_BYTES = (4, 2, 1)  # by kind
STEP = 32  # the inputs of a matrix are a multiple of it
TILE_OUTPUTS = 4  # ... and its outputs of this
POSITIONS_MIN = 4  # of a context and of a window: attention's scores come by fours

# experts_KIND: the routed experts of a layer.

EXPERT_COLUMNS = (
    *("gate", "up", "down"),  # matrices [I, D], [I, D] and [D, I], contiguous and of one kind
    *("gate_factors", "up_factors", "down_factors"),  # of INT8: [I], [I], [D] float32
    *("gate_bias", "up_bias", "down_bias"),  # [I], [I], [D] float32
)
"""Columns of a layer's table: addresses, 0 = there is none. A row of zeros is an expert that is not there."""

GLU, CLAMPED, GPT_OSS = 0, 1, 2
"""Forms of `model.maths.ExpertMaths.gated`, all with silu."""

EXPERTS_NUMBERS = (
    *("phase", "first", "end"),
    *("table", "experts", "inner", "form"),  # [E, columns], E, I
    *("rows", "row_count", "width"),  # float32 [R, D], R, D
    *("pair_row", "pair_expert", "pair_weight", "pairs"),  # int64 [P], int64 [P], float32 [P], P
    "sums",  # float32 [R, D], zeros to begin with
    *("starts", "order"),  # room: int64 [E + 1], int64 [P]
    *("row_lines", "gate_lines", "up_lines", "sum_lines"),  # room: int64 [P] each
    *("spread", "gates", "ups"),  # room: float32 [R, D], [P, I], [P, I]
)
EXPERTS_FACTORS = ("limit", "alpha")

EXPERTS_ALL, EXPERTS_PREPARE, EXPERTS_HIDDEN, EXPERTS_SUMS = range(4)
"""Phases. ALL is the other three one after the other over everything. PREPARE returns 0, or 1 + the number of the first
pair whose expert is not in the table; HIDDEN computes columns first : end of I, SUMS those of D."""

# block_KIND: the rest of a decoder block.

BLOCK_NUMBERS = (
    "phase",
    "first",
    "end",
    "sizes",
    "layer",
    "work",
    "keys",
    "values",
)  # the last two: pools [S, H, C, W]
BLOCK_SIZES = ("width", "heads", "kv_heads", "head_width", "experts", "chosen", "context", "window", "renormalises")
BLOCK_LAYER = (
    *("input_norm", "query", "key", "value", "query_bias", "key_bias", "value_bias"),
    *("query_norm", "query_norm_size", "key_norm", "key_norm_size"),  # sizes: 0, W, or all heads together
    *("output", "output_bias", "expert_norm", "router"),
)
"""Addresses: matrices of the kernel's kind, norms and biases float32; 0 = there is none."""

BLOCK_WORK = (
    *("rows", "row_count", "slots", "positions"),  # float32 [B, D], B, int64 [B], int64 [B]
    *("cosines", "sines"),  # float32 [B, W / 2]
    *("plain", "chosen", "weights"),  # results: what goes to the experts [B, D], int64 [B, K], float32 [B, K]
    *("spread", "states", "queries", "results"),  # room: float32 [B, D], [B, N + 2 H, W], [B, N, W], [B, N, W]
    *("scores", "score_width", "logits"),  # room: float32 [B, N, score_width], room for one position more; [B, E]
    *("lines", "head_lines"),  # room: int64 [7, B], [B, H, 4, G]
)
BLOCK_FACTORS = ("epsilon", "scale")

BLOCK_ALL, BLOCK_NORM, BLOCK_PROJECT, BLOCK_PLACE, BLOCK_ATTEND, BLOCK_OUTPUT, BLOCK_ROUTE = range(7)
"""Phases. ALL is the others one after the other over everything; parts: PROJECT of (N + 2 H) × W, ATTEND of B × H,
OUTPUT of D. Several at once may only be parts of one phase."""

# linear_KIND: a normalised row times a matrix, for the head.

LINEAR_NUMBERS = (
    *("phase", "first", "end", "rows", "row_count", "width", "norm", "matrix", "outputs"),
    *("results", "plain", "spread", "lines"),  # float32 [B, outputs]; room: float32 [B, D] twice, int64 [2, B]
)
LINEAR_FACTORS = ("epsilon",)
LINEAR_ALL, LINEAR_NORM, LINEAR_PROJECT = range(3)

# split: the pairs of a layer, dealt out as `decide.dealing.deal` says and cut into one part for each machine; 0 = here.

SPLIT_NUMBERS = (
    *("chosen", "weights", "row_count", "each"),  # int64 [T, K], float32 [T, K], T, K
    *("able", "able_each", "machines", "experts"),  # int64 [E, C]: who may compute each, -1 = nobody else; C, M, E
    "allowed",  # int64 [M]: 0 for those that get nothing this time
    "prices",  # float32 [3, M], as in `decide.dealing.Prices`
    *("rows", "row_words", "narrows"),  # [T, D] of so many four-byte words a row; 1: float32 that leave as bfloat16
    "frames",  # int64 [M]: where the arrays of each frame go, as in `wire.tensors`; the first is not used
    *("own_rows", "own_experts", "own_weights"),  # int64, int64, float32 [T × K]: our own pairs
    "counts",  # int64 [3, M]: pairs, rows and different experts of each part
    *("used", "row_pairs"),  # int64 [M, T]: which rows a part has, ascending, and how many pairs each
    *("where", "wanted", "order", "load"),  # room: int64 [E] three times, float32 [M]
    "seen",  # room: int64 [E]
)

# join: the sums that came back, added to those of the layer. Returns 1, and adds nothing, if one is not finite.

JOIN_NUMBERS = (
    *("sums", "rows", "width", "is_bf16"),  # [R, D] float32 or bfloat16, R, D
    *("used", "row_pairs"),  # int64 [R], as split gave them
    *("totals", "done"),  # float32 [T, D]; int64 [T], to which row_pairs are added
)

# widen: the arrays of a request's frame, as the experts' kernel takes them. Returns 0, or what is wrong with them.

WIDEN_NUMBERS = (
    "arrays",  # as `wire.tensors` lays them out, float32 or bfloat16 values
    *("row_count", "pairs", "width", "is_bf16"),  # R, P, D
    *("pair_row", "pair_expert"),  # results: int64 [P] each
    "rows",  # result: float32 [R, D], of bfloat16 ones
)
WIDEN_BAD_PAIR, WIDEN_BAD_WEIGHT, WIDEN_BAD_ROW = 1, 2, 3
"""A pair of a row that there is not or of no expert; a weight, or a row's value, that is not finite."""

# narrow: float32 sums as the bfloat16 that leave.

NARROW_NUMBERS = ("sums", "count", "target")

# answer_KIND: widen, experts_KIND and, where they leave as bfloat16, narrow: a request's arrays in, an answer's values
# out. Returns what widen does, or that an expert is not in the table.

ANSWER_NUMBERS = (
    *("arrays", "row_count", "pairs", "width", "is_bf16"),  # as for widen
    *("table", "experts", "inner", "form"),  # as for experts_KIND
    *("target", "room"),  # [R, D] of what the rows came as; `answer_room_bytes`, at a multiple of eight
)
ANSWER_FACTORS = EXPERTS_FACTORS
ANSWER_ABSENT = 4


def answer_room_bytes(rows: int, pairs: int, width: int, inner: int, experts: int) -> int:
    numbers = len(WIDEN_NUMBERS) + len(EXPERTS_NUMBERS)
    return 8 * (numbers + 7 * pairs + experts + 1) + 4 * (3 * rows * width + 2 * pairs * inner)


KERNELS = (
    *(f"{name}_{kind}" for name in ("experts", "answer") for kind in KINDS),
    *(f"{name}_{kind}" for name in ("block", "linear") for kind in KINDS[:2]),
    *("split", "join", "widen", "narrow"),
)
