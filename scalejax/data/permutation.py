"""A seeded permutation that is computed where it is asked for and never stored."""

import numpy as np

# Below this size the permutation is a sorted list of hashes; above, a Feistel network.
_SMALL = 4096
_ROUNDS = 6
_MASK = (1 << 64) - 1


def mix(x: np.ndarray) -> np.ndarray:
    """uint64[M] -> uint64[M]: the finalizer of splitmix64, a bijection that avalanches (Steele et al., OOPSLA 2014)."""
    x = x ^ (x >> np.uint64(30))
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def key_of(*parts: int) -> int:
    """One 64-bit key from several integers; different tuples give unrelated keys."""
    key = 0
    for part in parts:
        state = np.array([((key + int(part)) * 0x9E3779B97F4A7C15 + 0xD1B54A32D192ED03) & _MASK], np.uint64)
        key = int(mix(state)[0])
    return key


class Permutation:
    """A permutation of range(size) chosen by integers (a seed, an epoch, ...); position -> element.

    Any element is computed alone, so a stream resumes anywhere at no cost, an epoch begins without a pause, and 4
    billion examples take no memory. The definition depends on nothing but integer arithmetic (NumPy's `Generator`
    streams may change between versions).

    Small ranges: elements sorted by hash. Large: positions are written as (left, right) with left < a, right < b,
    a * b >= size, and six Feistel rounds add a hash of one half to the other, modulo a and b in turn (Black and
    Rogaway, "Ciphers with arbitrary finite domains", 2002); a result >= size is permuted again until it is inside
    (cycle walking; a * b exceeds the size by less than a, so this is rare).
    """

    def __init__(self, size: int, *key: int) -> None:
        if not 0 <= size < 1 << 62:
            raise ValueError(f"Permutation: size must be in [0, 2**62); got {size}.")
        self.size = size
        base = np.uint64(key_of(*key))
        if size <= _SMALL:
            hashes = mix(base + np.arange(size, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
            self._elements = np.argsort(hashes, kind="stable").astype(np.int64)
        else:
            self._elements = None
            self._radix = (root := int(np.ceil(np.sqrt(size)))), -(-size // root)
            self._keys = mix(base + np.arange(1, _ROUNDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """int64[M] positions in [0, size) -> int64[M] elements."""
        if self._elements is not None:
            return self._elements[positions]
        x = self._feistel(positions.astype(np.uint64))
        outside = np.flatnonzero(x >= np.uint64(self.size))
        while outside.size:
            again = self._feistel(x[outside])
            x[outside] = again
            outside = outside[again >= np.uint64(self.size)]
        return x.view(np.int64)

    def _feistel(self, x: np.ndarray) -> np.ndarray:
        radix_a, radix_b = (np.uint64(r) for r in self._radix)
        left = x // radix_b
        right = x - left * radix_b
        for r in range(0, _ROUNDS, 2):
            left = self._round(left, right, radix_a, self._keys[r])
            right = self._round(right, left, radix_b, self._keys[r + 1])
        return left * radix_b + right

    @staticmethod
    def _round(changed: np.ndarray, other: np.ndarray, radix: np.uint64, key: np.uint64) -> np.ndarray:
        h = other + key
        h *= np.uint64(0xBF58476D1CE4E5B9)
        h ^= h >> np.uint64(31)
        h *= np.uint64(0x94D049BB133111EB)
        h >>= np.uint64(32)
        h *= radix  # high 32 bits times radix, shifted back: uniform in [0, radix) up to 2**-32 * radix
        h >>= np.uint64(32)
        h += changed
        # changed + h < 2 * radix; if it is below radix the subtraction wraps round and loses the minimum.
        return np.minimum(h, h - radix)
