// The modulator sigma: its value, gradients and turning points, and its elementwise kernels.
#pragma once

#include "vectors.h"

namespace {

// The columns of the parameters: coefficients (C) and thresholds (T) of the orders 1 and 2, on
// the low and the high side. Only a monotone modulator has the last four columns: sigma(x) is x +
// LOW_OFFSET below LOW_TURN and HIGH_LEVEL above HIGH_TURN.
enum {
  LOW_C1, LOW_C2, LOW_T1, LOW_T2, HIGH_C1, HIGH_C2, HIGH_T1, HIGH_T2,
  LOW_TURN, HIGH_TURN, LOW_OFFSET, HIGH_LEVEL, COLUMNS
};
constexpr int64_t PLAIN_COLUMNS = LOW_TURN;

// Sums over the scores from which the gradients of the parameters follow. For each side: the sum of
// the incoming gradient times [score beyond threshold 1] (step), the distance to threshold 1 (1),
// the distance to threshold 2 (2) and its square (22). The last two sum the gradient beyond a turn.
struct Sums {
  Vec low_step{}, low_1{}, low_2{}, low_22{}, high_step{}, high_1{}, high_2{}, high_22{};
  Vec below_turn{}, above_turn{};
  Vec cap{}, shift{}, width{};  // of a soft-cap
};

struct NoModulator {
  explicit NoModulator(const float*) {}
  Vec value(Vec x) const { return x; }
  Vec backward(Vec, Vec grad, Sums&) const { return grad; }
  void add_gradients(const Sums&, double*) const {}
};

struct Modulator {
  float p[PLAIN_COLUMNS];
  explicit Modulator(const float* parameters) {
    std::copy(parameters, parameters + PLAIN_COLUMNS, p);
  }

  Vec value(Vec x) const {
    const Vec low_1 = distance(p[LOW_T1] - x), low_2 = distance(p[LOW_T2] - x);
    const Vec high_1 = distance(x - p[HIGH_T1]), high_2 = distance(x - p[HIGH_T2]);
    return x + p[LOW_C1] * low_1 + p[LOW_C2] * low_2 * low_2 + p[HIGH_C1] * high_1 +
           p[HIGH_C2] * high_2 * high_2;
  }

  // Returns the gradient of x, given that of value(x). Adds to the parameters' sums.
  Vec backward(Vec x, Vec grad, Sums& sums) const {
    const Vec low_1 = distance(p[LOW_T1] - x), low_2 = distance(p[LOW_T2] - x);
    const Vec high_1 = distance(x - p[HIGH_T1]), high_2 = distance(x - p[HIGH_T2]);
    const Vec low_step = low_1 > Vec{} ? grad : Vec{}, high_step = high_1 > Vec{} ? grad : Vec{};
    const Vec low_g = grad * low_2, high_g = grad * high_2;
    sums.low_step += low_step;
    sums.low_1 += grad * low_1;
    sums.low_2 += low_g;
    sums.low_22 += low_g * low_2;
    sums.high_step += high_step;
    sums.high_1 += grad * high_1;
    sums.high_2 += high_g;
    sums.high_22 += high_g * high_2;
    return grad - p[LOW_C1] * low_step - 2 * p[LOW_C2] * low_g + p[HIGH_C1] * high_step +
           2 * p[HIGH_C2] * high_g;
  }

  void add_gradients(const Sums& s, double* out) const {
    out[LOW_C1] += sum_lanes_double(s.low_1);
    out[LOW_C2] += sum_lanes_double(s.low_22);
    out[LOW_T1] += p[LOW_C1] * sum_lanes_double(s.low_step);
    out[LOW_T2] += 2 * p[LOW_C2] * sum_lanes_double(s.low_2);
    out[HIGH_C1] += sum_lanes_double(s.high_1);
    out[HIGH_C2] += sum_lanes_double(s.high_22);
    out[HIGH_T1] -= p[HIGH_C1] * sum_lanes_double(s.high_step);
    out[HIGH_T2] -= 2 * p[HIGH_C2] * sum_lanes_double(s.high_2);
  }
};

struct MonotoneModulator {
  Modulator inside;
  float low_turn, high_turn, low_offset, high_level;
  explicit MonotoneModulator(const float* parameters)
      : inside(parameters),
        low_turn(parameters[LOW_TURN]),
        high_turn(parameters[HIGH_TURN]),
        low_offset(parameters[LOW_OFFSET]),
        high_level(parameters[HIGH_LEVEL]) {}

  IntVec is_below(Vec x) const { return x < broadcast(low_turn); }
  // A score of +inf stays +inf, so that an overflow remains visible.
  IntVec is_above(Vec x) const { return (x > broadcast(high_turn)) & (x < broadcast(INFINITE)); }

  Vec value(Vec x) const {
    const Vec z = is_below(x) ? x + low_offset : inside.value(x);
    return is_above(x) ? broadcast(high_level) : z;
  }

  Vec backward(Vec x, Vec grad, Sums& sums) const {
    const Vec below = is_below(x) ? grad : Vec{}, above = is_above(x) ? grad : Vec{};
    sums.below_turn += below;
    sums.above_turn += above;
    return inside.backward(x, (is_below(x) | is_above(x)) ? Vec{} : grad, sums) + below;
  }

  void add_gradients(const Sums& s, double* out) const {
    inside.add_gradients(s, out);
    out[LOW_OFFSET] += sum_lanes_double(s.below_turn);
    out[HIGH_LEVEL] += sum_lanes_double(s.above_turn);
  }
};

// The soft-cap c tanh((x + shift) / width). Its parameters are these three numbers.
constexpr int64_t CAP_COLUMNS = 3;

struct SoftCap {
  float cap, shift, width;
  explicit SoftCap(const float* parameters)
      : cap(parameters[0]), shift(parameters[1]), width(parameters[2]) {}
  // inf and -inf stay, so that an overflow remains visible and -inf still excludes.
  Vec value(Vec x) const {
    return x - x == 0 ? cap * hyperbolic_tangent((x + shift) / width) : x;
  }
  Vec backward(Vec x, Vec grad, Sums& sums) const {
    const Vec u = x - x == 0 ? (x + shift) / width : Vec{}, t = hyperbolic_tangent(u);
    const Vec inner = x - x == 0 ? grad * (cap / width) * (1 - t * t) : Vec{};
    sums.cap += grad * t;
    sums.shift += inner;
    sums.width += inner * u;
    return inner;
  }
  void add_gradients(const Sums& s, double* out) const {
    out[0] += sum_lanes_double(s.cap);
    out[1] += sum_lanes_double(s.shift);
    out[2] -= sum_lanes_double(s.width);
  }
};

// A modulator whose values attention multiplies by `Attention.factor`.
template <class Sigma>
struct Scaled : Sigma {
  using Sigma::Sigma;
};
template <class Sigma>
constexpr bool is_scaled = false;
template <class Sigma>
constexpr bool is_scaled<Scaled<Sigma>> = true;

// Selects the modulator's type by the number of columns (0: no modulator) and calls
// `function` with a null pointer to this type.
template <class Function>
void dispatch_modulator(int64_t columns, Function function) {
  if (columns == COLUMNS)
    function(static_cast<MonotoneModulator*>(nullptr));
  else if (columns == CAP_COLUMNS)
    function(static_cast<SoftCap*>(nullptr));
  else if (columns)
    function(static_cast<Modulator*>(nullptr));
  else
    function(static_cast<NoModulator*>(nullptr));
}

// out (rows, columns): out[r] is the sum of partials[i] over all i with i % rows == r. `partials`
// has `count` rows, `row` elements apart.
void sum_partials(
    const double* partials, int64_t count, int64_t row, int64_t rows, int64_t columns, float* out) {
  for (int64_t r = 0; r < rows; r++)
    for (int64_t c = 0; c < columns; c++) {
      double sum = 0;
      for (int64_t i = r; i < count; i += rows) sum += partials[i * row + c];
      out[r * columns + c] = static_cast<float>(sum);
    }
}

}  // namespace

struct Modulation {
  // The number of scores (dense). Blocks of `inner` scores belong to one head: the head of score i
  // is i / inner % heads.
  int64_t count, inner, heads, threads;
  int64_t columns;
  const float* parameters;                    // (heads, columns)
  const float *scores, *grad;            // (count,); grad is null in the forward pass
  float* out;                            // (count,): sigma(scores), or the gradient of scores
  float* grad_parameters;                     // (heads, columns); unused if grad is null
};

namespace {

template <class Sigma>
void modulate(const Modulation& m) {
  const int64_t pieces = (m.count + m.inner - 1) / m.inner;
  std::vector<double> parameter_sums(m.grad ? pieces * COLUMNS : 0);
#pragma omp parallel for num_threads(std::min(m.threads, pieces)) schedule(static)
  for (int64_t i = 0; i < pieces; i++) {
    const Sigma sigma(m.parameters + i % m.heads * m.columns);
    constexpr int64_t BLOCK = 64 * LANES;
    const int64_t end = std::min((i + 1) * m.inner, m.count);
    for (int64_t j0 = i * m.inner; j0 < end; j0 += BLOCK) {
      const int64_t j1 = std::min(j0 + BLOCK, end);
      Sums sums;
      for (int64_t j = j0; j < j1; j += LANES) {
        const Vec x = load(m.scores + j, j1 - j);
        store(m.out + j,
              m.grad ? sigma.backward(x, load(m.grad + j, j1 - j), sums) : sigma.value(x), j1 - j);
      }
      if (m.grad) sigma.add_gradients(sums, &parameter_sums[i * COLUMNS]);
    }
  }
  if (m.grad)
    sum_partials(parameter_sums.data(), pieces, COLUMNS, m.heads, m.columns, m.grad_parameters);
}

}  // namespace

extern "C" int modulation(const Modulation* modulation) {
  return guarded([&] {
    dispatch_modulator(modulation->columns, [&](auto* kind) {
      modulate<std::remove_pointer_t<decltype(kind)>>(*modulation);
    });
  });
}

struct Tails {
  int64_t rows;
  const float* parameters;  // (rows, PLAIN_COLUMNS)
  float* out;          // (rows, 4): the columns LOW_TURN to HIGH_LEVEL
  float* jacobian;     // (rows, 4, PLAIN_COLUMNS): derivatives of `out`
};

namespace {

// The low turn: the largest x <= 0 such that sigma decreases just below x. `value` is sigma(point);
// the Jacobians are derivatives with respect to the parameters. Without such a point, `point` is
// -inf and the rest 0.
struct Turn {
  double point = -INFINITE, value = 0;
  double point_jacobian[PLAIN_COLUMNS] = {}, value_jacobian[PLAIN_COLUMNS] = {};
};

Turn low_turn(const double* p) {
  const double thresholds[] = {p[LOW_T1], p[LOW_T2], p[HIGH_T1], p[HIGH_T2]};
  double edges[6] = {-MAX_DISTANCE, 0, 0, 0, 0, MAX_DISTANCE};
  std::copy_n(thresholds, 4, edges + 1);
  std::sort(edges + 1, edges + 5);
  // Search the pieces between neighbouring thresholds from 0 downwards for the first piece in which
  // sigma decreases. Within a piece, sigma'(x) = level + slope * x.
  for (int piece = 4; piece >= 0; piece--) {
    const double left = edges[piece], right = edges[piece + 1], end = std::min(right, 0.0);
    const bool low_1 = right <= p[LOW_T1], low_2 = right <= p[LOW_T2];
    const bool high_1 = left >= p[HIGH_T1], high_2 = left >= p[HIGH_T2];
    const double level = 1 - low_1 * p[LOW_C1] - 2 * low_2 * p[LOW_C2] * p[LOW_T2] +
                         high_1 * p[HIGH_C1] - 2 * high_2 * p[HIGH_C2] * p[HIGH_T2];
    const double slope = 2 * (low_2 * p[LOW_C2] + high_2 * p[HIGH_C2]);
    const bool falls_at_end = level + slope * end < 0;
    if (left >= end || !(falls_at_end || level + slope * left < 0)) continue;
    Turn turn;
    const double x = turn.point = falls_at_end ? end : std::clamp(-level / slope, left, end);
    const double below_1 = low_1 * (p[LOW_T1] - x), below_2 = low_2 * (p[LOW_T2] - x);
    const double above_1 = high_1 * (x - p[HIGH_T1]), above_2 = high_2 * (x - p[HIGH_T2]);
    turn.value = x + p[LOW_C1] * below_1 + p[LOW_C2] * below_2 * below_2 + p[HIGH_C1] * above_1 +
                 p[HIGH_C2] * above_2 * above_2;
    double* point_jacobian = turn.point_jacobian;
    if (!falls_at_end) {
      point_jacobian[LOW_C1] = low_1 / slope;
      point_jacobian[LOW_C2] = 2 * below_2 / slope;
      point_jacobian[LOW_T2] = 2 * low_2 * p[LOW_C2] / slope;
      point_jacobian[HIGH_C1] = -high_1 / slope;
      point_jacobian[HIGH_C2] = -2 * above_2 / slope;
      point_jacobian[HIGH_T2] = 2 * high_2 * p[HIGH_C2] / slope;
    } else if (right <= 0) {  // the turn lies on a threshold and moves with it
      const int64_t columns[] = {LOW_T1, LOW_T2, HIGH_T1, HIGH_T2};
      point_jacobian[columns[std::find(thresholds, thresholds + 3, right) - thresholds]] = 1;
    }
    const double partials[] = {
        below_1, below_2 * below_2, low_1 * p[LOW_C1], 2 * p[LOW_C2] * below_2,
        above_1, above_2 * above_2, -high_1 * p[HIGH_C1], -2 * p[HIGH_C2] * above_2};
    for (int64_t i = 0; i < PLAIN_COLUMNS; i++)
      turn.value_jacobian[i] = partials[i] + (level + slope * x) * point_jacobian[i];
    return turn;
  }
  return {};
}

}  // namespace

extern "C" int tails(const Tails* tails) {
  constexpr int64_t HALF = PLAIN_COLUMNS / 2;
  for (int64_t row = 0; row < tails->rows; row++) {
    const float* parameters = tails->parameters + row * PLAIN_COLUMNS;
    float* out = tails->out + row * HALF;
    float* jacobian = tails->jacobian + row * HALF * PLAIN_COLUMNS;
    // The high side of sigma(x) is the low side of -sigma(-x).
    double low[PLAIN_COLUMNS], high[PLAIN_COLUMNS];
    for (int64_t i = 0; i < PLAIN_COLUMNS; i++) {
      low[i] = parameters[i];
      high[i] = -parameters[(i + HALF) % PLAIN_COLUMNS];
    }
    const Turn below = low_turn(low), above = low_turn(high);
    const bool turns = below.point > -INFINITE;
    out[0] = below.point;
    out[1] = -above.point;
    out[2] = turns ? below.value - below.point : 0;
    out[3] = -above.value;
    for (int64_t i = 0; i < PLAIN_COLUMNS; i++) {
      const int64_t mirrored = (i + HALF) % PLAIN_COLUMNS;
      jacobian[i] = below.point_jacobian[i];
      jacobian[PLAIN_COLUMNS + i] = above.point_jacobian[mirrored];
      jacobian[2 * PLAIN_COLUMNS + i] = below.value_jacobian[i] - below.point_jacobian[i];
      jacobian[3 * PLAIN_COLUMNS + i] = above.value_jacobian[mirrored];
    }
  }
  return 1;
}
