"""Fits a model's constants to measured times: damped least squares of the log error."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

_DIFFERENCE = 1e-3  # of a constant, relative, for the slopes
_LONGEST_STEP = 1.0  # in the log of a constant, a round
_MOST_DAMPING = 1e8
_SMALLEST_GAIN = 1e-7  # of the squared error, relative: the end


@dataclass(frozen=True)
class Fit:
    """Fitted constants.

    Attributes:
      constants: name -> value, those that were not free included.
      error: root mean square of log(predicted / measured).
      worst: largest of its absolute values.
      rounds: steps taken.
    """

    constants: dict[str, float]
    error: float
    worst: float
    rounds: int


def fit(
    predict: Callable[[Any, Mapping[str, float]], float],
    samples: Sequence[tuple[Any, float]],
    start: Mapping[str, float],
    free: Sequence[str],
    limits: Mapping[str, tuple[float, float]] | None = None,
    rounds: int = 200,
) -> Fit:
    """Finds constants that predict measured times.

    Args:
      predict: (what was measured, constants) -> seconds.
      samples: (what was measured, seconds).
      start: name -> first value; those that are free are positive.
      free: names to fit.
      limits: name -> lowest and highest value.
      rounds: steps at most.

    Raises:
      ValueError: nothing to fit to, or a name that is not in `start`.
    """
    unknown = sorted(set(free) - set(start))
    if unknown or not samples:
        raise ValueError(f"unknown constants {unknown}" if unknown else "no samples")
    lows, highs = np.log([(limits or {}).get(n, (1e-30, 1e30)) for n in free]).T
    measured = np.log([seconds for _, seconds in samples])

    def residuals(point: np.ndarray) -> np.ndarray:
        constants = {**start, **dict(zip(free, np.exp(point).tolist(), strict=True))}
        predicted = [predict(what, constants) for what, _ in samples]
        return np.log(predicted) - measured

    point = np.clip(np.log([start[name] for name in free]), lows, highs)
    found, damping, done = residuals(point), 1e-2, 0
    while done < rounds and damping < _MOST_DAMPING:
        done += 1
        slopes = _slopes(residuals, point, found, highs)
        square, gradient = slopes.T @ slopes, slopes.T @ found
        gain = 0.0
        while gain <= 0 and damping < _MOST_DAMPING:
            # a constant that changes nothing has a slope of 0, and stays
            damped = square + np.diag(damping * square.diagonal() + 1e-12)
            step = np.linalg.solve(damped, -gradient)
            step = np.clip(step, -_LONGEST_STEP, _LONGEST_STEP)
            tried = np.clip(point + step, lows, highs)
            there = residuals(tried)
            gain = float(found @ found - there @ there)
            damping *= 1 / 3 if gain > 0 else 4
        if gain > 0:
            small = gain < _SMALLEST_GAIN * float(found @ found)
            point, found = tried, there
            if small:
                break
    constants = {**start, **dict(zip(free, np.exp(point).tolist(), strict=True))}
    error = float(np.sqrt(np.mean(found**2)))
    return Fit(constants, error, float(np.abs(found).max()), done)


def _slopes(
    residuals: Callable[[np.ndarray], np.ndarray],
    point: np.ndarray,
    found: np.ndarray,
    highs: np.ndarray,
) -> np.ndarray:
    """Returns the derivatives of the residuals, [samples, constants]."""
    columns = []
    for axis in range(point.size):
        # backwards where forwards is past the limit
        step = -_DIFFERENCE if point[axis] + _DIFFERENCE > highs[axis] else _DIFFERENCE
        moved = point.copy()
        moved[axis] += step
        columns.append((residuals(moved) - found) / step)
    return np.stack(columns, axis=1)
