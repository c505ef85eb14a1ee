// The interface of row functions: mappings whose weights depend on all scores of a query, such as
// entmax. A row function is a struct that derives from RowFunction:
//   Name(float parameter)                         the constructor, once per head; 0 for no parameter
//   Statistics reduce(const Scores& x) const      the statistics of a row, such as max and 1 / sum
//   Entry entry(Vec x, const Statistics&) const   the weight p of one score, and its slope
//   Vec mean(const Totals&), Vec gradient(Vec slope, Vec grad, Vec mean)
//                                                 the gradient with respect to the score
// The slope is the derivative of p by its score with the statistics held fixed. `grad` is the
// gradient with respect to p.
//
// Each lane of a Vec holds one query. An excluded key has the score -inf. Its weight and its slope
// must be 0, also if all statistics are 0, as they are in lanes without a query. NaN must give NaN;
// vec_max(a, b) and vec_min(a, b) return b if one of them is NaN.
#pragma once

#include "vectors.h"
#include "windows.h"

namespace {

// The scores of LANES queries for the keys [first, last). Those of key s are at data + s * stride.
struct Scores {
  const float* data;
  int64_t stride, first, last;
  Vec operator[](int64_t s) const { return load(data + s * stride); }
  // The sum of term(score) over all keys. Four partial sums reduce the rounding error.
  template <class Term>
  Vec sum(Term term) const {
    Vec partials[4] = {};
    for (int64_t s = first; s < last; s++) partials[s % 4] += term((*this)[s]);
    return (partials[0] + partials[1]) + (partials[2] + partials[3]);
  }
  // The maximum of term(score) over all keys; NaN if one is NaN.
  template <class Term>
  Vec max(Term term) const {
    Vec maximum = broadcast(-INFINITE), nan{};
    for (int64_t s = first; s < last; s++) {
      const Vec x = term((*this)[s]);
      maximum = vec_max(maximum, x);
      nan = x != x ? x : nan;
    }
    return nan != nan ? nan : maximum;
  }
  Vec max() const {
    return max([](Vec x) { return x; });
  }
};

// What `reduce` returns and `entry` reads; the names fit the functions of the package. The forward
// pass stores it for the backward pass.
struct Statistics {
  Vec top{}, threshold{}, factor{};
};

struct Entry {
  Vec weight, slope;
};

// Sums over the keys of a query in the backward pass, complete when `mean` is called.
struct Totals {
  Vec slope{}, slope_grad{}, weight_grad{};  // of slope, slope * grad and weight * grad
  Vec first{}, second{};                     // what `add` adds
};

struct RowFunction {
  // Whether the parameter has a gradient. Then it is the sum over all keys and queries of
  //   Vec parameter_gradient(Vec x, Entry, Vec grad, const Statistics&, const Totals&) const
  static constexpr bool learns = false;
  // Adds a key to `first` and `second`; only called if the row function learns.
  void add(Vec, Entry, const Statistics&, Totals&) const {}
  // For weights that sum to 1, like those of softmax.
  static Vec mean(const Totals& t) { return t.weight_grad; }
  static Vec gradient(Vec slope, Vec grad, Vec mean) { return slope * (grad - mean); }
};

// 1 / sum; 0 for a query that may attend to no key.
inline Vec inverse(Vec sum) { return sum == 0 ? Vec{} : 1 / sum; }

inline bool any(IntVec lanes) {
  for (int i = 0; i < LANES; i++)
    if (lanes[i]) return true;
  return false;
}

// log(x) for normal x > 0, with an error of at most one ulp; for 0, a number near -88. `minus_one` is
// x - 1, which may be more accurate than x.
inline Vec logarithm(Vec x, Vec minus_one) {
  // x = 2^exponent (1 + f) with 1 + f in [sqrt(1/2), sqrt(2)).
  const IntVec exponent = ((IntVec)x - 0x3f3504f3) >> 23;
  const Vec f = exponent == 0 ? minus_one : (Vec)((IntVec)x - (exponent << 23)) - 1.0f;
  const Vec n = __builtin_convertvector(exponent, Vec), square = f * f;
  // Least-squares polynomial of (log(1 + f) - f + f^2 / 2) / f^3.
  Vec y = broadcast(-7.670865208e-2f);
  y = y * f + 1.278553754e-1f;
  y = y * f - 1.315694600e-1f;
  y = y * f + 1.419764757e-1f;
  y = y * f - 1.662327349e-1f;
  y = y * f + 2.000144571e-1f;
  y = y * f - 2.500082850e-1f;
  y = y * f + 3.333332837e-1f;
  y = y * f * square + n * -2.12194440e-4f;
  return f + (y - 0.5f * square) + n * 0.693359375f;
}
inline Vec logarithm(Vec x) { return logarithm(x, x - 1.0f); }

// -p log(p)
inline Vec entropy(Vec p) { return p > 0 ? -p * logarithm(p) : p; }

}  // namespace
