"""The formula of a score: the shift of the query's value vectors, B, and similarity.

Everything that scores calls these functions: a batch, an explanation, and training. Arrays are
torch tensors, or numpy arrays where the model runs without torch. `namespace`, `cast` and
`to_numpy` are the calls in which the two differ.

B is the only trained part of the paper's method: one small matrix for each layer and KV head. An
artifact may also weigh heads, and add similarity terms; neither is in the paper.

Axes: L layers, H KV heads, P projection dimension, D head dimension, N documents, T query tokens,
S document tokens, W similarity windows of a document, of which the first is the whole document.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = Any
"""A numpy array or a torch tensor."""

Numbers = np.ndarray[Any, Any]
"""A numpy array."""

# The least length by which a projected shift is divided. The cosine of a shorter shift goes to 0
# with its length.
EPSILON = 1e-6

# Document tokens in one product. OpenBLAS, which numpy multiplies with, takes several threads from
# 262,144 multiplications on, and starting them takes longer than products of this size do.
COLUMNS = 64


def namespace(array: Any) -> Any:
    """The module of an array or a dtype: numpy or torch."""
    return sys.modules[type(array).__module__.partition(".")[0]]


def cast(array: Array, dtype: str) -> Array:
    """The array in the dtype of this name; not a copy if the array already has this dtype."""
    kind = getattr(namespace(array), dtype)
    if isinstance(array, np.ndarray | np.generic):
        return array.astype(kind, copy=False)
    return array.to(kind)


def to_numpy(array: Array) -> Numbers:
    """A numpy array with the same numbers, in host memory."""
    if isinstance(array, np.ndarray | np.generic):
        return np.asarray(array)
    return np.asarray(array.detach().cpu())


def representational_shift(conditioned: Array, alone: Array) -> Array:
    """The shift, (N, H, T, D) fp32: Eq. (3) of the paper, for models with rotary positions.

    Args:
        conditioned: Value vectors of the query's tokens after each document, (N, H, T, D).
        alone: Value vectors of the same tokens after the null prefix, (N or 1, H, T, D).
    """
    return cast(conditioned, "float32") - cast(alone, "float32")


def _length(vectors: Array, least: float) -> Array:
    """Lengths of vectors (..., D), (..., 1), and at least ``least``."""
    xp = namespace(vectors)
    return xp.clip(xp.linalg.vector_norm(vectors, axis=-1, keepdims=True), least, None)


def shift_terms(shifts: Array, weight: Array, head_weight: Array | None = None) -> Array:
    """The shift terms before the mean over tokens: cos(B shift, ones), times the head's weight.

    The cosine between the projected shift and the all-ones vector is in [-1, 1], and exactly 0
    where the projected shift is zero. A score is the sum of these terms over layers and heads and
    their `token_mean` (paper, Section 4.3), to which `combine` adds the similarity
    terms.

    >>> import numpy as np
    >>> shifts = np.array([[[2.0, 2.0], [1.0, -1.0], [0.0, 0.0]]])
    >>> shift_terms(shifts, np.eye(2)[None]).round(4)
    array([[1., 0., 0.]], dtype=float32)

    Args:
        shifts: (..., H, T, D).
        weight: B, (..., H, P, D), in the dtype of the shifts. The matrix product has this dtype.
        head_weight: (..., H); None for 1 each, as in the paper.

    Returns:
        (..., H, T), fp32.
    """
    projected = cast(shifts @ weight.mT, "float32")
    length = _length(projected, EPSILON)[..., 0]
    cosines = projected.sum(-1) / (length * projected.shape[-1] ** 0.5)
    return cosines if head_weight is None else cosines * head_weight[..., None]


def token_mean(terms: Array, counts: Array) -> Array:
    """The mean over the query's tokens, (...). Weights of tokens would stand here.

    Args:
        terms: (..., T), 0 after shorter queries. In float64, the sum of float32 terms does not
            depend on these zeros.
        counts: The number of tokens, (...) or (1,).
    """
    return terms.sum(-1) / counts


def token_shares(terms: Array, counts: Array) -> Array:
    """What each token adds to `token_mean`, (..., T); ``counts`` is (..., 1)."""
    return terms / counts


def similarity_windows(length: int, size: int | None) -> list[tuple[int, int]]:
    """Start and stop of a document's similarity windows: the whole document, then its parts.

    A part begins after each half of ``size``, and has a position that the part before it lacks. A
    document of at most ``size`` positions has no parts.

    >>> similarity_windows(40, 16)
    [(0, 40), (0, 16), (8, 24), (16, 32), (24, 40)]

    Args:
        length: Positions of the document with its template.
        size: Positions of a part, an even number; None for the whole document only.
    """
    spans = [(0, length)]
    if size is not None and length > size:
        half = size // 2
        for start in range(0, length - half, half):
            spans.append((start, min(start + size, length)))
    return spans


def pooled(hidden: Array, lengths: Sequence[int], window: int | None = None) -> list[Array]:
    """A vector for each similarity window of each text, N times (W, C) fp32.

    It is the mean over the whole text, and the sum over a part: the cosine of a sum is that of the
    mean. Sums are taken in float64, in which they do not depend on the order.

    Args:
        hidden: Hidden states, (N, S, C).
        lengths: The length of each text; further positions are padding.
        window: Positions of a similarity window; None for the whole text only.
    """
    xp = namespace(hidden)
    rows, longest, width = hidden.shape
    half = longest if window is None else window // 2
    halves = -(-longest // half)
    ends = xp.asarray(lengths, device=hidden.device)[:, None, None]
    places = xp.arange(longest, device=hidden.device)[:, None]
    states = xp.zeros((rows, halves * half, width), dtype=xp.float64, device=hidden.device)
    states[:, :longest] = xp.where(places < ends, hidden, 0)
    sums = states.reshape(rows, halves, half, width).sum(2)
    vectors = [sums.sum(1)[:, None] / ends, sums[:, :-1] + sums[:, 1:]]
    vectors = cast(xp.concatenate(vectors, 1), "float32")
    counts = [len(similarity_windows(length, window)) for length in lengths]
    return [row[:count] for row, count in zip(vectors, counts, strict=True)]


def maxsim(
    query: Array,
    document: Array,
    in_document: Array,
    windows: Sequence[tuple[int, int]] | None = None,
) -> Array:
    """Each query token's best cosine with a token of the document, fp32.

    This is ColBERT's MaxSim before its sum, of value vectors over all heads. It is ours.

    Args:
        query: Value vectors, (N, H, T, D).
        document: Value vectors, (N, H, S, D).
        in_document: Which tokens are the document's and not the template's, (N, S).
        windows: From `similarity_windows`.

    Returns:
        (N, T); with windows, the best cosines with a token of each window, (N, W, T).
    """
    xp = namespace(query)
    query = cast(query, "float32")
    document = cast(document, "float32")
    products = []
    for start in range(0, document.shape[2], COLUMNS):
        tokens = document[:, :, start : start + COLUMNS]
        products.append((query @ tokens.mT).sum(1))
    squares = [xp.einsum("nhtd,nhtd->nt", values, values) for values in (query, document)]
    # Clipped before the root, whose gradient at 0 is infinite.
    lengths = [xp.sqrt(xp.clip(square, 1e-24, None)) for square in squares]
    cosines = xp.concatenate(products, -1) / (lengths[0][..., None] * lengths[1][:, None])
    cosines = xp.where(in_document[:, None], cosines, -1)
    if windows is None:
        return xp.amax(cosines, -1)
    return xp.stack([xp.amax(cosines[..., start:stop], -1) for start, stop in windows], 1)


def cosine(first: Array, second: Array) -> Array:
    """Cosines of vectors (N, C), (N,) fp64."""
    first = cast(first, "float64")
    second = cast(second, "float64")
    product = (first * second).sum(-1)
    return product / (_length(first, 1e-8) * _length(second, 1e-8))[..., 0]


def similarity_terms(similarity: Array, weights: Array | None) -> Array:
    """What similarity adds to a score: the cosine term with the bias, then the MaxSim terms.

    Args:
        similarity: (..., 1 + K): the cosine of document and query, then K parts of MaxSim.
        weights: g of the cosine, w of MaxSim, and the bias b, (3,); None for no similarity terms.

    Returns:
        (..., 1 + K). Their sum is g cosine + w MaxSim + b.
    """
    if weights is None:
        return 0 * similarity
    cosine_term = weights[0] * similarity[..., :1] + weights[2]
    terms = [cosine_term, weights[1] * similarity[..., 1:]]
    return namespace(similarity).concatenate(terms, axis=-1)


def combine(shift_score: Array, similarity: Array, weights: Array | None) -> Array:
    """The score, (...), above 0 where a document is relevant.

    Args:
        shift_score: The sum of `shift_terms` over layers and heads, averaged over tokens, (...).
        similarity: As in `similarity_terms`, of each similarity window, (..., W, 1 + K). The
            window whose terms have the greatest sum counts.
        weights: As in `similarity_terms`.
    """
    if weights is None:
        return shift_score
    of_windows = similarity_terms(similarity, weights).sum(-1)
    return shift_score + namespace(of_windows).amax(of_windows, -1)


@dataclass(frozen=True)
class Weights:
    """B, (L, H, P, D), and its optional weights, in arrays; see `projection.Projection`."""

    weight: Array
    layers: tuple[int, ...]
    head_weight: Array | None = None
    agreement: Array | None = None

    def state_dict(self) -> Mapping[str, Any]:
        """The arrays by name."""
        arrays = {name: array for name, array in vars(self).items() if array is not None}
        del arrays["layers"]
        return arrays
