"""Of SciPy, which has no types, what this package uses."""

import numpy as np
from numpy.typing import ArrayLike

def nnls(A: ArrayLike, b: ArrayLike) -> tuple[np.ndarray, float]: ...

class OptimizeResult:
    x: np.ndarray

def isotonic_regression(y: ArrayLike) -> OptimizeResult: ...
