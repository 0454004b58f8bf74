"""Linear self-attention as a function: one kernel, and the kernel that comes nearest to what a layer does.

    y_T,e = sum_(s <= T) sum_abc M_e,abc x_s,a x_s,b x_T,c,      one head: M_e,abc = sym_ab[(W_V)_ea (W_K^T W_Q)_bc]              (R42)

A kernel is [E, D, D, D], symmetric in its second and third axis. Every kernel is a sum of heads.

Source: Zucchet et al. 2023, arXiv:2309.01775, equation 1; the fits are ours, docs/theory.md.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from scipy.optimize import least_squares  # type: ignore[import-untyped]  # scipy ships no types
from torch import Tensor

from graven.audit.forms import Forms
from graven.audit.polynomial import Polynomial, monomials
from graven.errors import SpecError
from graven.shapes import check
from graven.tasks.teacher import Teacher


@dataclass(frozen=True, kw_only=True, eq=False)
class Attention:
    """One head of causal linear self-attention, without softmax or scale.

    Args:
        w_v, w_k, w_q: Its matrices; held in float64.
    Raises:
        ShapeError: They do not fit each other.
        SpecError: One is not finite, or the head reads nothing but 0.
    """

    w_v: Float[Tensor, "V D"]
    w_k: Float[Tensor, "K D"]
    w_q: Float[Tensor, "K D"]

    def __post_init__(self) -> None:
        check(w_v=(self.w_v, "V D"), w_k=(self.w_k, "K D"), w_q=(self.w_q, "K D"))
        for name in ("w_v", "w_k", "w_q"):
            if not bool(getattr(self, name).isfinite().all()):
                raise SpecError(f"`{name}` has an entry that is not finite; give numbers.")
            object.__setattr__(self, name, getattr(self, name).detach().double())
        if not bool(self.kernel.any()):
            raise SpecError("W_V or W_K^T W_Q is 0, so this attention reads 0 always; give matrices whose product is not.")

    @classmethod
    def of(cls, teacher: "Attention | Teacher") -> "Attention":
        """A teacher as its pupils see it: a `Teacher` divides what it reads by the root of its power."""
        if isinstance(teacher, Attention):
            return teacher
        return cls(w_v=teacher.w_v / teacher.power**0.5, w_k=teacher.w_k, w_q=teacher.w_q)

    @property
    def key_query(self) -> Float[Tensor, "D D"]:
        """W_K^T W_Q: all of keys and queries that is seen from outside."""
        return self.w_k.T @ self.w_q

    @property
    def kernel(self) -> Float[Tensor, "E D D D"]:
        """M of equation R42."""
        return _of_head(self.w_v, self.key_query)

    def read(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T V"]:
        """What every token reads, in the dtype of the tokens."""
        check(x=(x, f"B T {self.w_v.shape[1]}"))
        return (x @ self.key_query.to(x.dtype) @ x.mT).mT.tril() @ (x @ self.w_v.to(x.dtype).T)


class Kernel(NamedTuple):
    """A kernel and how much of a layer it is.

    Args:
        kernel: M of equation R42.
        energy: Share of the squared coefficients (or of the power of what is read, where a layer is a black box) that the kernel explains.
    """

    kernel: Float[Tensor, "E D D D"]
    energy: float


class Step(NamedTuple):
    """The gradient step nearest to a kernel.

    Args:
        rate: Its learning rate.
        rates: What each output and feature has for it, [E, features].
        attention: The same step as attention.
    """

    rate: float
    rates: Float[Tensor, "E F"]
    attention: Attention


def kernel_forms(kernel: Float[Tensor, "E D D D"]) -> Forms:
    """The forms of a layer with this kernel: all D (D + 1) / 2 products of entries summed, and D entries of the token."""
    outputs, width = kernel.shape[:2]
    row, column = torch.triu_indices(width, width)
    count = len(row)
    inputs = kernel.new_zeros(count + width, width + 1, width + 1)
    inputs[range(count), row, column] = 1.0
    inputs[range(count, count + width), range(width), width] = 1.0
    form = kernel.new_zeros(outputs, count + width, count + width)
    form[:, :count, count:] = _monomial(kernel)
    recurrence = torch.cat([kernel.new_ones(count), kernel.new_zeros(width)])
    return Forms((inputs + inputs.mT) / 2, recurrence, (form + form.mT) / 2)


def gradient_step(*, width: int, outputs: int, rate: float) -> Attention:
    """One step of gradient descent on tokens [x; y], from 0, as attention: y_T = rate sum_s y_s x_s^T x_T.

    Raises:
        SpecError: No entry of a token is left for x.
    Source: von Oswald et al. 2022, arXiv:2212.07677, proposition 1; Zucchet et al. 2023, arXiv:2309.01775, section 5.
    """
    features = width - outputs
    if features < 1:
        raise SpecError(f"a token has {width} entries and {outputs} outputs are read, which leaves none for x; in-context regression has both.")
    unit = torch.eye(width, dtype=torch.float64)
    return Attention(w_v=rate * unit[features:], w_k=unit[:features], w_q=unit[:features])


def read_kernel(kernel: Float[Tensor, "E D D D"], x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T E"]:
    """What every token reads from a kernel, equation R42."""
    sums = (x[..., :, None] * x[..., None, :]).cumsum(1)
    return torch.einsum("ntab,eabc,ntc->nte", sums, kernel.to(x.dtype), x)


def best_kernel(found: Polynomial, *, width: int, blank: tuple[int, ...] = ()) -> Kernel:
    """The kernel whose polynomial is nearest, least squares over all coefficients.

    The same M stands in the terms of every earlier token, and once more, on monomials of degree 3, in those of the last one.

    Args:
        found: Of a layer.
        width: Of a token.
        blank: As in `polynomial`: entries that are 0 in the last token, so that terms with them are not there.
    Raises:
        SpecError: The layer reads nothing but 0.
    Source: ours, equation R42; tests/test_audit.py.
    """
    total, (outputs, length, _) = float(found.squares().sum()), found.one.shape
    if total == 0:
        raise SpecError("the layer reads 0 whatever its tokens are; there is nothing to compare.")
    squares = width * (width + 1) // 2
    names = monomials(width)
    _, last = torch.triu_indices(length, length, offset=1)
    earlier = found.two[:, last == length - 1][:, :, :squares, squares:].sum(1).flatten(1)  # [E, (ab) c]
    degree3 = {m: i for i, m in enumerate(sorted({tuple(sorted((*ab, c))) for ab in names[:squares] for c in range(width)}))}
    place = torch.zeros(squares * width, len(degree3), dtype=torch.float64)
    place[range(squares * width), [degree3[tuple(sorted((*ab, c)))] for ab in names[:squares] for c in range(width)]] = 1.0
    place[[bool({*ab, c} & {*blank}) for ab in names[:squares] for c in range(width)]] = 0.0
    start = width + squares  # monomials of degree 1 and 2 come first, those of degree 3 next, in the same order as here
    right = earlier + found.one[:, -1, start : start + len(degree3)] @ place.T
    normal = (length - 1) * torch.eye(squares * width, dtype=torch.float64) + place @ place.T
    mono = torch.linalg.solve(normal, right.T).T
    return Kernel(_from_monomial(mono.reshape(outputs, squares, width)), float((mono * right).sum()) / total)


def best_attention(kernel: Float[Tensor, "E D D D"], *, steps: int = 100) -> Attention:
    """One head whose kernel is nearest, least squares by Levenberg-Marquardt from the leading singular vectors of M as a matrix (ea, bc).

    Source: ours; tests/test_audit.py finds heads that were hidden in a kernel.
    """
    outputs, width = kernel.shape[:2]
    left, values, right = torch.linalg.svd(kernel.reshape(outputs * width, width * width), full_matrices=False)
    scale = float(values[0])
    if scale == 0:
        raise SpecError("the kernel is 0, so no attention is nearest to it.")
    wanted = _monomial(kernel / scale).numpy()

    def parts(vector: np.ndarray) -> tuple[Tensor, Tensor]:
        values_of, pairs = torch.split(torch.from_numpy(vector), [outputs * width, width * width])
        return values_of.reshape(outputs, width), pairs.reshape(width, width)

    def residual(vector: np.ndarray) -> np.ndarray:
        return (_monomial(_of_head(*parts(vector))).numpy() - wanted).ravel()

    def jacobian(vector: np.ndarray) -> np.ndarray:
        w_v, m = parts(vector)
        unit = torch.eye(width, dtype=torch.float64)
        by_value = _monomial(_of_head(unit, m)).flatten(1).T.contiguous()  # [(ab) c, D]
        by_pair = _monomial(_of_head(w_v, torch.eye(width, dtype=torch.float64))).reshape(-1, width)  # [e (ab), b]
        return np.hstack([torch.kron(torch.eye(outputs, dtype=torch.float64), by_value).numpy(), torch.kron(by_pair, unit).numpy()])

    start = torch.cat([left[:, 0], right[0]]).numpy()
    solved = least_squares(residual, start, jacobian, method="trf", xtol=1e-15, ftol=1e-15, gtol=1e-15, max_nfev=steps)
    w_v, m = parts(solved.x)
    return Attention(w_v=scale * w_v, w_k=torch.eye(width, dtype=torch.float64), w_q=m)


def best_step(kernel: Float[Tensor, "E D D D"]) -> Step:
    """The gradient step nearest to a kernel on tokens [x; y], y as wide as what is read.

    Raises:
        SpecError: A token is not wider than what is read.
    """
    outputs, width = kernel.shape[:2]
    features = width - outputs
    gradient_step(width=width, outputs=outputs, rate=1.0)  # refuses widths without an x
    rates = torch.stack([2 * kernel[e, range(features), features + e, range(features)] for e in range(outputs)])
    return Step(float(rates.mean()), rates, gradient_step(width=width, outputs=outputs, rate=float(rates.mean())))


def fitted_kernel(x: Float[Tensor, "B T D"], y: Float[Tensor, "B T E"]) -> Kernel:
    """The kernel of a layer that is known by what it reads only: fitted on the first half of the sequences, judged on the others.

    Raises:
        ShapeError: The parts do not fit each other.
        SpecError: There are fewer numbers than a kernel has.
    Source: ours; tests/test_audit.py.
    """
    width = check(x=(x, "B T D"), y=(y, "B T E"))["D"]
    x, y = x.double(), y.double()
    row, column = torch.triu_indices(width, width)
    sums = (x[..., row] * x[..., column]).cumsum(1)
    features = (sums[..., None] * x[:, :, None]).flatten(2)
    half = len(x) // 2
    if features.shape[2] > half * x.shape[1]:
        raise SpecError(f"a kernel has {features.shape[2]} numbers an output and {half * x.shape[1]} tokens are there; give more sequences.")
    mono = torch.linalg.lstsq(features[:half].flatten(0, 1), y[:half].flatten(0, 1)).solution  # [(ab) c, E]
    rest = (features[half:] @ mono - y[half:]).square().mean() / y[half:].square().mean()
    return Kernel(_from_monomial(mono.T.reshape(y.shape[2], len(row), width)), 1.0 - float(rest))


def _of_head(w_v: Tensor, key_query: Tensor) -> Tensor:
    form = torch.einsum("ea,bc->eabc", w_v, key_query)
    return (form + form.transpose(1, 2)) / 2


def _monomial(kernel: Float[Tensor, "E D D D"]) -> Float[Tensor, "E C D"]:
    """Coefficients of x_a x_b, a <= b, and x_c; in the order of `monomials`."""
    row, column = torch.triu_indices(*kernel.shape[1:3])
    return kernel[:, row, column] * torch.where(row == column, 1.0, 2.0).to(kernel.dtype)[:, None]


def _from_monomial(mono: Float[Tensor, "E C D"]) -> Float[Tensor, "E D D D"]:
    outputs, _, width = mono.shape
    row, column = torch.triu_indices(width, width)
    kernel = mono.new_zeros(outputs, width, width, width)
    kernel[:, row, column] += mono / 2
    kernel[:, column, row] += mono / 2
    return kernel
