"""The definition of `ngram_match` for one request, with loops over lists."""


def continuation(text: list[int], limit: int, min_n: int, max_n: int) -> list[int]:
    """Return the `limit` tokens that follow the last of the longest matches, or none without a match."""
    for n in range(max_n, min_n - 1, -1):
        for end in range(len(text) - 1, n - 1, -1):  # the match is text[end - n : end]
            if text[end - n : end] == text[len(text) - n :]:
                longer = list(text)
                for step in range(limit):
                    longer.append(longer[end + step])
                return longer[len(text) :]
    return []
