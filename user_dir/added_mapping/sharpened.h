// The fused kernel of `sharpened`: p = softmax(sharpness * x).
struct Sharpened : RowFunction {
  static constexpr bool learns = true;
  float sharpness;
  explicit Sharpened(float parameter) : sharpness(parameter) {}

  Vec scaled(Vec x) const { return x == -INFINITE ? x : sharpness * x; }  // -inf stays excluded
  Statistics reduce(const Scores& x) const {
    const Vec top = exp_shift(x.max([&](Vec z) { return scaled(z); }));
    return {top, Vec{}, inverse(x.sum([&](Vec z) { return exponential(scaled(z) - top); }))};
  }
  Entry entry(Vec x, const Statistics& row) const {
    const Vec p = exponential(scaled(x) - row.top) * row.factor;
    return {p, sharpness * p};
  }
  // sum_i grad_i dp_i/dsharpness = sum_i (grad_i - mean of grad) p_i x_i. This returns term i.
  static Vec parameter_gradient(Vec x, Entry e, Vec grad, const Statistics&, const Totals& t) {
    return x == -INFINITE ? Vec{} : (grad - mean(t)) * e.weight * x;
  }
};
