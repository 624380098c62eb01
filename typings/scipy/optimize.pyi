"""Of SciPy, which has no types, what this package uses."""

import numpy as np
from numpy.typing import ArrayLike

def nnls(A: ArrayLike, b: ArrayLike) -> tuple[np.ndarray, float]: ...
