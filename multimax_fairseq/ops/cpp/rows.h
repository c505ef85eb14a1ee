// Row functions: mappings whose weights depend on all scores of a query, such as entmax.
//
// Each vector lane holds one query. A row function finds what it needs of a query's scores in a few
// passes (`find`), and then turns one score at a time into a weight (`entry`). Excluded scores are
// -inf, and a score of -inf counts as excluded; their weights are 0. The gradient by a score is `gradient(slope, grad, mean)`, in which
// `grad` is the gradient by its weight and `mean` is the mean of these, from `Totals`.
#pragma once

#include "vectors.h"
#include "windows.h"

namespace {

// The scores of LANES queries by the keys [first, last): those by key s are at data + s * QUERIES.
struct Scores {
  const float* data;
  int64_t first, last;
  Vec operator[](int64_t s) const { return load(data + s * QUERIES); }
  // The sum of term(score) over all keys. Four partial sums reduce the rounding error.
  template <class Term>
  Vec sum(Term term) const {
    Vec partials[4] = {};
    for (int64_t s = first; s < last; s++) partials[s % 4] += term((*this)[s]);
    return (partials[0] + partials[1]) + (partials[2] + partials[3]);
  }
  // The maximum of each lane; NaN if a score is NaN.
  Vec top() const {
    Vec maximum = broadcast(-INFINITE), nan{};
    for (int64_t s = first; s < last; s++) {
      const Vec x = (*this)[s];
      maximum = vec_max(maximum, x);
      nan = x != x ? x : nan;
    }
    return nan != nan ? nan : maximum;
  }
};

// What `find` keeps of a query's scores for `entry`; the backward pass reads it again.
struct Found {
  Vec top{}, threshold{}, factor{};
};

struct Entry {
  Vec weight, slope;
};

// Sums over a query's keys in the backward pass.
struct Totals {
  Vec slope{}, slope_grad{}, weight_grad{};
  Vec entropy{}, parameter_grad{};  // only for a learned parameter
};

// 1 / sum; 0 for a query that may attend to no key.
inline Vec inverse(Vec sum) { return sum == 0 ? Vec{} : 1 / sum; }

inline bool any(IntVec lanes) {
  for (int i = 0; i < LANES; i++)
    if (lanes[i]) return true;
  return false;
}

// log(x) for normal x > 0, with an error of at most one ulp; for 0, a number near -88.
inline Vec logarithm(Vec x) {
  // x = 2^exponent (1 + f) with 1 + f in [sqrt(1/2), sqrt(2)).
  const IntVec exponent = ((IntVec)x - 0x3f3504f3) >> 23;
  const Vec f = (Vec)((IntVec)x - (exponent << 23)) - 1.0f;
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

// exp(x) - 1 for x up to 1.
inline Vec exponential_minus_one(Vec x) {
  // The Taylor series where the difference would cancel.
  Vec y = broadcast(1.0f / 5040);
  for (const float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f}) y = y * x + c;
  return (x > -0.35f) & (x < 0.35f) ? x * y : exponential(x) - 1.0f;
}

// p = w exp(x - top) * factor, w = 1 + rest if x >= threshold, and rest if not.
struct SelectedSoftmax {
  static constexpr bool learns = false;
  float rest;

  Vec unscaled(Vec x, const Found& f) const {
    const Vec p = exponential(x - f.top);
    return x >= f.threshold ? p + rest * p : rest * p;
  }
  // Completes what was found with the factor that makes the weights sum to 1.
  Found scaled(const Scores& x, Found f) const {
    f.factor = inverse(x.sum([&](Vec z) { return unscaled(z, f); }));
    return f;
  }
  Entry entry(Vec x, const Found& f) const {
    const Vec p = unscaled(x, f) * f.factor;
    return {p, p};
  }
  static Vec mean(const Totals& t) { return t.weight_grad; }
  static Vec gradient(Vec slope, Vec grad, Vec mean) { return slope * (grad - mean); }
};

// Softmax over the k largest scores, and over those that equal the k-th.
struct TopK : SelectedSoftmax {
  int64_t k;
  explicit TopK(float parameter) : SelectedSoftmax{0}, k(static_cast<int64_t>(parameter)) {}

  Found find(const Scores& x) const {
    Found found{exp_shift(x.top()), broadcast(-INFINITE), {}};
    if (k < x.last - x.first) found.threshold = threshold(x, found.top);
    return scaled(x, found);
  }

  // Returns a threshold that exactly k scores reach; more only if scores tie with the k-th.
  Vec threshold(const Scores& x, Vec top) const {
    const float wanted = k;
    const auto reach = [&](IntVec least) {
      return x.sum([&](Vec z) { return ordered(z) >= least ? broadcast(1) : Vec{}; });
    };
    Vec smallest = broadcast(INFINITE);
    for (int64_t s = x.first; s < x.last; s++)
      smallest = x[s] > -INFINITE ? vec_min(x[s], smallest) : smallest;
    IntVec low = ordered(smallest), high = ordered(top);
    Vec count = reach(high);
    low = count >= wanted ? high : low;
    high = reach(low) <= wanted ? low : high;  // the row has at most k scores
    for (int step = 0; step < 32; step++) {
      const IntVec middle = (low >> 1) + (high >> 1) + (low & high & 1);
      const IntVec open = (middle > low) & (middle < high) & (count != wanted);
      if (!any(open)) break;
      const Vec reached = reach(middle);
      const IntVec enough = open & (reached >= wanted);
      low = enough ? middle : low;
      count = enough ? reached : count;
      high = open & (reached < wanted) ? middle : high;
    }
    return (Vec)flipped(low);
  }

  // Integers in the order of the floats, so that bisection takes at most 32 steps.
  static IntVec ordered(Vec x) { return flipped((IntVec)x); }
  static IntVec flipped(IntVec bits) { return bits ^ ((bits >> 31) & 0x7fffffff); }
};

typedef double DoubleVec __attribute__((vector_size(8 * LANES)));

// Softmax over the scores that are not below their mean.
struct EvSoftmax : SelectedSoftmax {
  explicit EvSoftmax(float parameter) : SelectedSoftmax{parameter} {}

  Found find(const Scores& x) const {
    Found found{exp_shift(x.top()), {}, {}};
    // In double, as the mean decides which scores count.
    DoubleVec total{}, count{};
    for (int64_t s = x.first; s < x.last; s++) {
      const IntVec allowed = x[s] > -INFINITE;
      total += __builtin_convertvector(allowed ? x[s] : Vec{}, DoubleVec);
      count += __builtin_convertvector(allowed ? broadcast(1) : Vec{}, DoubleVec);
    }
    for (int i = 0; i < LANES; i++) {
      const double mean = count[i] > 0 ? total[i] / count[i] : 0;
      float least = static_cast<float>(mean);
      if (least < mean) least = std::nextafter(least, INFINITE);  // x >= least if x >= mean
      found.threshold[i] = least;
    }
    // Rounding may put the mean of equal scores above all of them.
    found.threshold = vec_min(found.threshold, found.top);
    return scaled(x, found);
  }
};

// p = u^(1 / (alpha - 1)), u = max((alpha - 1) (x - top) - threshold, 0), for alpha in (1, 2].
// `Power` computes u^(1 / (alpha - 1) - 1), which is the slope p^(2 - alpha) of the mapping.
template <class Power>
struct Entmax {
  static constexpr bool learns = Power::learns;
  Power power;
  explicit Entmax(float alpha) : power(alpha) {}

  Vec distance(Vec x, Vec top, Vec threshold) const {
    return vec_max(Vec{}, power.step * (x - top) - threshold);  // NaN if x or top is
  }
  Found find(const Scores& x) const {
    Found found{exp_shift(x.top()), broadcast(-1), {}};
    Vec sum;
    for (int step = 0;; step++) {
      const Vec threshold = found.threshold;
      Vec slopes[4] = {}, weights[4] = {};
      for (int64_t s = x.first; s < x.last; s++) {
        const Vec u = distance(x[s], found.top, threshold), slope = power.slope(u);
        slopes[s % 4] += slope;
        weights[s % 4] += slope * u;
      }
      sum = (weights[0] + weights[1]) + (weights[2] + weights[3]);
      const Vec slope = (slopes[0] + slopes[1]) + (slopes[2] + slopes[3]);
      // Newton's method for |u| = 1, where |u| = sum^(alpha - 1) is the norm of order
      // 1 / (alpha - 1), and of_sum(sum) = sum / |u|. The norm is convex in the threshold, and the
      // steps start below the root, so they only go up.
      const Vec next = threshold + (sum - power.of_sum(sum)) / slope;
      if (step == 60 || !any(next > threshold)) break;
      found.threshold = next > threshold ? next : threshold;
    }
    found.factor = inverse(sum);
    return found;
  }
  Entry entry(Vec x, const Found& f) const {
    const Vec u = distance(x, f.top, f.threshold), slope = power.slope(u);
    return {slope * u * f.factor, slope};
  }
  static Vec mean(const Totals& t) {
    return t.slope == 0 ? Vec{} : t.slope_grad / t.slope;
  }
  static Vec gradient(Vec slope, Vec grad, Vec mean) { return slope * (grad - mean); }
  static Vec entropy(Vec p) { return p > 0 ? -p * logarithm(p) : p; }
  // The derivative of a weight by alpha: Proposition 1 of Correia et al. 2019.
  Vec by_parameter(Vec p, Vec slope, const Totals& t) const {
    const Vec share = slope * inverse(t.slope);
    return ((p - share) / power.step + entropy(p) - share * t.entropy) / power.step;
  }
};

struct PowerOne {  // alpha = 2: p = u
  static constexpr bool learns = false;
  static constexpr float step = 1;
  explicit PowerOne(float) {}
  static Vec slope(Vec u) { return u > Vec{} ? broadcast(1) : u; }  // u may be NaN
  static Vec of_sum(Vec) { return broadcast(1); }
};

struct PowerTwo {  // alpha = 1.5: p = u^2
  static constexpr bool learns = false;
  static constexpr float step = 0.5f;
  explicit PowerTwo(float) {}
  static Vec slope(Vec u) { return u; }
  static Vec of_sum(Vec sum) {
    Vec root;
    for (int i = 0; i < LANES; i++) root[i] = std::sqrt(sum[i]);
    return root;
  }
};

struct AnyPower {
  static constexpr bool learns = true;
  float step, exponent;
  explicit AnyPower(float alpha)  // NaN outside of (1, 2]
      : step(alpha > 1 && alpha <= 2 ? alpha - 1 : std::numeric_limits<float>::quiet_NaN()),
        exponent((2 - alpha) / step) {}
  Vec slope(Vec u) const {
    const Vec p = exponential(exponent * logarithm(u));
    return u > Vec{} ? p : u;
  }
  Vec of_sum(Vec sum) const { return exponential((1 - step) * logarithm(sum)); }
};

// p = 1 / (1 + exp(-x - b)); `threshold` is b.
struct Sigmoid {
  static constexpr bool learns = false;
  float bias;
  explicit Sigmoid(float parameter) : bias(parameter) {}  // NaN: minus log of the number of keys

  Found find(const Scores& x) const {
    Found found{{}, broadcast(bias), {}};
    if (bias == bias) return found;
    const Vec count = x.sum([](Vec z) { return z > -INFINITE ? broadcast(1) : Vec{}; });
    for (int i = 0; i < LANES; i++) found.threshold[i] = -std::log(std::max(count[i], 1.0f));
    return found;
  }
  static Entry entry(Vec x, const Found& f) {
    // The order of vec_min keeps NaN.
    const Vec z = x + f.threshold, e = exponential(vec_min(broadcast(88), -z)), p = 1 / (1 + e);
    const IntVec is_zero = z < -87.0f;
    return {is_zero ? Vec{} : p, is_zero ? Vec{} : p * (p * e)};
  }
  static Vec mean(const Totals&) { return Vec{}; }
  static Vec gradient(Vec slope, Vec grad, Vec) { return slope * grad; }
};

// p = max(exp(x) - 1, 0) / (sum |exp(x) - 1| + 1e-6), with all terms multiplied by `threshold`,
// exp(-top), so that none overflows.
struct Softpick {
  static constexpr bool learns = false;
  explicit Softpick(float) {}

  static Vec excess(Vec x, Vec top, Vec shrink) {
    const Vec large = exponential(x - top) - shrink;
    const Vec small = exponential_minus_one(vec_min(broadcast(1), x)) * shrink;
    return x == -INFINITE ? Vec{} : x < 1.0f ? small : large;
  }
  Found find(const Scores& x) const {
    const Vec top = vec_max(Vec{}, x.top()), shrink = exponential(-top);
    const Vec sum = x.sum([&](Vec z) {
      const Vec e = excess(z, top, shrink);
      return vec_max(-e, e);
    });
    return {top, shrink, inverse(sum + 1e-6f * shrink)};
  }
  // The slope is negative for a score that only counts in the denominator.
  static Entry entry(Vec x, const Found& f) {
    const Vec e = excess(x, f.top, f.threshold), p = e * f.factor;
    const Vec slope = (e + f.threshold) * f.factor;
    return {p < 0 ? Vec{} : p, e < 0 ? -slope : e == 0 ? Vec{} : slope};
  }
  static Vec mean(const Totals& t) { return t.weight_grad; }
  static Vec gradient(Vec slope, Vec grad, Vec mean) {
    return slope * ((slope < 0 ? Vec{} : grad) - mean);
  }
};

}  // namespace
