"""A reward that a small model learns within a few steps: the share of vowels in the response."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs) -> float:
    return sum(letter in "aeiou" for letter in solution_str) / max(1, len(solution_str))
