// Dropout whose random numbers are a hash of the seed and an entry's position. The backward pass
// recomputes them instead of storing a mask.
#pragma once

#include "vectors.h"

struct Drop {
  int64_t count, threads;
  float probability;  // of dropping an entry; < 1
  uint64_t seed;
  const float* entries;  // (count,)
  float* out;            // (count,)
};

namespace {

// The hash sees the entries as a matrix with rows of this length. A thread processes whole rows.
constexpr int64_t HASH_ROW = 1 << 12;

// The finaliser of SplitMix64.
inline uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// The factors for the entries of a matrix: 0 for a dropped entry, otherwise 1 / (1 - probability).
// Each (seed, matrix) pair has its own random numbers.
struct Dropout {
  float factor;
  uint32_t threshold;
  uint64_t seed;
  Dropout(float probability, uint64_t seed, int64_t matrix)
      : factor(1 / (1 - probability)),
        threshold(static_cast<uint32_t>(probability * 4294967296.0)),
        seed(mix(seed + 0x9e3779b97f4a7c15u * (matrix + 1))) {}
  uint32_t key(int64_t row) const { return static_cast<uint32_t>(mix(seed + row)); }
  // The factors of LANES entries from `column`, in the row with this key.
  Vec keep(uint32_t key, int64_t column) const {
    UintVec x;
    for (int64_t i = 0; i < LANES; i++) x[i] = static_cast<uint32_t>(column + i);
    x = x * 0x9e3779b9u ^ key;
    // The finaliser of MurmurHash3.
    x = (x ^ (x >> 16)) * 0x85ebca6bu;
    x = (x ^ (x >> 13)) * 0xc2b2ae35u;
    x = x ^ (x >> 16);
    return x >= threshold ? broadcast(factor) : Vec{};
  }
};

}  // namespace

extern "C" int drop(const Drop* drop) {
  const Drop& a = *drop;
  const Dropout dropout(a.probability, a.seed, 0);
  const int64_t rows = (a.count + HASH_ROW - 1) / HASH_ROW;
  const int64_t threads = std::max<int64_t>(1, std::min(a.threads, rows));
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t row = 0; row < rows; row++) {
    const uint32_t key = dropout.key(row);
    const int64_t first = row * HASH_ROW;
    const int64_t columns = std::min(HASH_ROW, a.count - first);
    const float* in = a.entries + first;
    float* out = a.out + first;
    int64_t i = 0;
    for (; i + LANES <= columns; i += LANES) store(out + i, load(in + i) * dropout.keep(key, i));
    const Vec last = dropout.keep(key, i);
    for (int64_t left = 0; i + left < columns; left++) out[i + left] = in[i + left] * last[left];
  }
  return 1;
}
