// The row functions of the package's mappings.
#pragma once

#include "rows.h"

namespace {

// p = w exp(x - top) * factor, w = 1 + rest if x >= threshold, and rest if not.
struct SelectedSoftmax : RowFunction {
  float rest;
  explicit SelectedSoftmax(float rest) : rest(rest) {}

  Vec unscaled(Vec x, const Statistics& row) const {
    const Vec p = exponential(x - row.top);
    return x >= row.threshold ? p + rest * p : rest * p;
  }
  // Adds the factor that makes the weights sum to 1.
  Statistics scaled(const Scores& x, Statistics row) const {
    row.factor = inverse(x.sum([&](Vec z) { return unscaled(z, row); }));
    return row;
  }
  Entry entry(Vec x, const Statistics& row) const {
    const Vec p = unscaled(x, row) * row.factor;
    return {p, p};
  }
};

// Softmax over the k largest scores, and over those that equal the k-th.
struct TopK : SelectedSoftmax {
  int64_t k;
  explicit TopK(float parameter) : SelectedSoftmax(0), k(static_cast<int64_t>(parameter)) {}

  Statistics reduce(const Scores& x) const {
    Statistics row{exp_shift(x.max()), broadcast(-INFINITE), {}};
    if (k < x.last - x.first) row.threshold = threshold(x, row.top);
    return scaled(x, row);
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
  explicit EvSoftmax(float parameter) : SelectedSoftmax(parameter) {}

  Statistics reduce(const Scores& x) const {
    Statistics row{exp_shift(x.max()), {}, {}};
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
      row.threshold[i] = least;
    }
    // Rounding may put the mean of equal scores above all of them.
    row.threshold = vec_min(row.threshold, row.top);
    return scaled(x, row);
  }
};

// p = u^(1 / (alpha - 1)), u = max(1 + v, 0), v = (alpha - 1) (x - top) - threshold, for alpha in
// (1, 2]. `Power` computes u^(1 / (alpha - 1) - 1), which is the slope p^(2 - alpha) of the mapping.
template <class Power>
struct Entmax : RowFunction {
  static constexpr bool learns = Power::learns;
  Power power;
  explicit Entmax(float alpha) : power(alpha) {}

  // v, at least -1; NaN if x or top is.
  Vec distance(Vec x, Vec top, Vec threshold) const {
    return vec_max(broadcast(-1), power.step * (x - top) - threshold);
  }
  Statistics reduce(const Scores& x) const {
    Statistics row{exp_shift(x.max()), {}, {}};
    Vec sum;
    for (int step = 0;; step++) {
      const Vec threshold = row.threshold;
      Vec slopes[4] = {}, weights[4] = {};
      for (int64_t s = x.first; s < x.last; s++) {
        const Vec v = distance(x[s], row.top, threshold), slope = power.slope(v);
        slopes[s % 4] += slope;
        weights[s % 4] += slope * (v + 1.0f);
      }
      sum = (weights[0] + weights[1]) + (weights[2] + weights[3]);
      const Vec slope = (slopes[0] + slopes[1]) + (slopes[2] + slopes[3]);
      // Newton's method for |u| = 1, where |u| = sum^(alpha - 1) is the norm of order
      // 1 / (alpha - 1), and of_sum(sum) = sum / |u|. The norm is convex in the threshold, and the
      // steps start below the root, so they only go up.
      const Vec next = threshold + (sum - power.of_sum(sum)) / slope;
      if (step == 60 || !any(next > threshold)) break;
      row.threshold = next > threshold ? next : threshold;
    }
    row.factor = inverse(sum);
    return row;
  }
  Entry entry(Vec x, const Statistics& row) const {
    const Vec v = distance(x, row.top, row.threshold), slope = power.slope(v);
    return {slope * (v + 1.0f) * row.factor, slope};
  }
  static Vec mean(const Totals& t) {
    return t.slope == 0 ? Vec{} : t.slope_grad / t.slope;
  }
  void add(Vec x, Entry e, const Statistics& row, Totals& t) const {
    t.first += entropy(e.weight);
    t.second += e.slope * distance(x, row.top, row.threshold);
  }
  // Proposition 1 of Correia et al. 2019, with share = slope / sum(slope). Near alpha = 1, the
  // weight and the share are almost equal: weight - share = slope (v - mean of v) / sum(weight),
  // with the slopes as weights of the mean, does not cancel.
  Vec parameter_gradient(
      Vec x, Entry e, Vec grad, const Statistics& row, const Totals& t) const {
    const Vec scale = inverse(t.slope), share = e.slope * scale;
    const Vec v = distance(x, row.top, row.threshold) - t.second * scale;
    const Vec derivative =
        (e.slope * v * row.factor / power.step + entropy(e.weight) - share * t.first) / power.step;
    return (grad - mean(t)) * derivative;  // derivatives sum to 0: removes rounding errors
  }
};

struct PowerOne {  // alpha = 2: p = u
  static constexpr bool learns = false;
  static constexpr float step = 1;
  explicit PowerOne(float) {}
  static Vec slope(Vec v) { return v > -1.0f ? broadcast(1) : v + 1.0f; }  // v may be NaN
  static Vec of_sum(Vec) { return broadcast(1); }
};

struct PowerTwo {  // alpha = 1.5: p = u^2
  static constexpr bool learns = false;
  static constexpr float step = 0.5f;
  explicit PowerTwo(float) {}
  static Vec slope(Vec v) { return v + 1.0f; }
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
  Vec slope(Vec v) const {
    const Vec p = exponential(exponent * logarithm(v + 1.0f, v));
    return v > -1.0f ? p : v + 1.0f;
  }
  Vec of_sum(Vec sum) const { return exponential((1 - step) * logarithm(sum)); }
};

// p = 1 / (1 + exp(-x - b)); `threshold` is b.
struct Sigmoid : RowFunction {
  float bias;
  explicit Sigmoid(float parameter) : bias(parameter) {}  // NaN: minus log of the number of keys

  Statistics reduce(const Scores& x) const {
    Statistics row{{}, broadcast(bias), {}};
    if (bias == bias) return row;
    const Vec count = x.sum([](Vec z) { return z > -INFINITE ? broadcast(1) : Vec{}; });
    for (int i = 0; i < LANES; i++) row.threshold[i] = -std::log(std::max(count[i], 1.0f));
    return row;
  }
  static Entry entry(Vec x, const Statistics& row) {
    // The order of vec_min keeps NaN.
    const Vec z = x + row.threshold, e = exponential(vec_min(broadcast(88), -z)), p = 1 / (1 + e);
    const IntVec is_zero = z < -87.0f;
    return {is_zero ? Vec{} : p, is_zero ? Vec{} : p * (p * e)};
  }
  static Vec mean(const Totals&) { return Vec{}; }
  static Vec gradient(Vec slope, Vec grad, Vec) { return slope * grad; }
};

// p = max(exp(x) - 1, 0) / (sum |exp(x) - 1| + 1e-6), with all terms multiplied by `threshold`,
// exp(-top), so that none overflows.
struct Softpick : RowFunction {
  explicit Softpick(float) {}

  static Vec excess(Vec x, Vec top, Vec shrink) {
    const Vec large = exponential(x - top) - shrink;
    const Vec small = exponential_minus_one(vec_min(broadcast(1), x)) * shrink;
    return x == -INFINITE ? Vec{} : x < 1.0f ? small : large;
  }
  Statistics reduce(const Scores& x) const {
    const Vec top = vec_max(Vec{}, x.max()), shrink = exponential(-top);
    const Vec sum = x.sum([&](Vec z) {
      const Vec e = excess(z, top, shrink);
      return vec_max(-e, e);
    });
    return {top, shrink, inverse(sum + 1e-6f * shrink)};
  }
  // The slope is negative for a score that only counts in the denominator.
  static Entry entry(Vec x, const Statistics& row) {
    const Vec e = excess(x, row.top, row.threshold), p = e * row.factor;
    const Vec slope = (e + row.threshold) * row.factor;
    return {p < 0 ? Vec{} : p, e < 0 ? -slope : e == 0 ? Vec{} : slope};
  }
  static Vec gradient(Vec slope, Vec grad, Vec mean) {
    return slope * ((slope < 0 ? Vec{} : grad) - mean);
  }
};

// p = softmax(beta x), beta = max(P(H), 1), H the entropy of softmax(x); `threshold` is beta. It has
// no gradient here.
struct AdaptiveTemperature : RowFunction {
  explicit AdaptiveTemperature(float) {}

  Statistics reduce(const Scores& x) const {
    Statistics row{exp_shift(x.max()), broadcast(1), {}};
    const Vec sum = x.sum([&](Vec z) { return unscaled(z, row); });
    const Vec mean = x.sum([&](Vec z) { return unscaled(z, row) * distance(z, row); });
    const Vec entropy = logarithm(sum) - mean * inverse(sum);
    Vec fitted{};  // TEMPERATURE_FIT in mappings/adaptive_temperature.py
    for (const float c : {-0.037f, 0.481f, -2.3f, 4.917f, -1.791f}) fitted = fitted * entropy + c;
    row.threshold = vec_max(row.threshold, fitted);
    row.factor = inverse(x.sum([&](Vec z) { return unscaled(z, row); }));
    return row;
  }
  // At least -88, for which `exponential` returns 0, so that its product with 0 is never NaN.
  static Vec distance(Vec x, const Statistics& row) {
    return vec_max(broadcast(-88), x - row.top);
  }
  static Vec unscaled(Vec x, const Statistics& row) {
    return exponential(row.threshold * distance(x, row));
  }
  static Entry entry(Vec x, const Statistics& row) {
    return {unscaled(x, row) * row.factor, Vec{}};
  }
};

// Calls function(static_cast<Row*>(nullptr)) for the row function with this number, in the order of
// FUNCTIONS in ops/row_function.py.
template <class Function>
void dispatch_row(int64_t number, Function function) {
  switch (number) {
    case 0: return function(static_cast<TopK*>(nullptr));
    case 1: return function(static_cast<EvSoftmax*>(nullptr));
    case 2: return function(static_cast<Entmax<PowerOne>*>(nullptr));
    case 3: return function(static_cast<Entmax<PowerTwo>*>(nullptr));
    case 4: return function(static_cast<Entmax<AnyPower>*>(nullptr));
    case 5: return function(static_cast<Sigmoid*>(nullptr));
    case 6: return function(static_cast<Softpick*>(nullptr));
    case 7: return function(static_cast<AdaptiveTemperature*>(nullptr));
  }
}

}  // namespace
