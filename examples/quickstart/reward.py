"""Reward of the quickstart task: the share of the response that is made of the wanted characters."""

from typing import Any


def share(_prompt: str, response: str, answer: str, row: dict[str, Any]) -> float:
    """``answer`` lists the wanted characters; a response shorter than the row's ``length`` counts as if padded."""
    return sum(character in answer for character in response) / max(len(response), row["length"])
