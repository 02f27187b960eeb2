"""Reward of the arithmetic questions: the answer must be the last number of the response, and soon."""

import re
from typing import Any


def last_number(_prompt: str, response: str, answer: int, _row: dict[str, Any]) -> float:
    """1.0 if the last whole number is the answer, 0.2 if the answer occurs at all, else 0."""
    numbers = [int(text.replace(",", "")) for text in re.findall(r"-?\d[\d,]*", response)]
    if numbers and numbers[-1] == answer:
        return 1.0
    return 0.2 if answer in numbers else 0.0
