#include "tests/plans/chain_model.h"

#include <algorithm>
#include <cmath>
#include <random>

#include "penstock/error.h"

namespace penstock::plans {

namespace {

size_t at(int row, int column, int columns) { return static_cast<size_t>(row * columns + column); }

// Returns a (rows x inner) times b (inner x columns).
Matrix multiply(const Matrix& a, const Matrix& b, int inner) {
  const int rows = static_cast<int>(a.size()) / inner;
  const int columns = static_cast<int>(b.size()) / inner;
  Matrix out(static_cast<size_t>(rows * columns));
  for (int r = 0; r < rows; ++r)
    for (int k = 0; k < inner; ++k)
      for (int c = 0; c < columns; ++c)
        out[at(r, c, columns)] += a[at(r, k, inner)] * b[at(k, c, columns)];
  return out;
}

Matrix transpose(const Matrix& a, int columns) {
  const int rows = static_cast<int>(a.size()) / columns;
  Matrix out(a.size());
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < columns; ++c) out[at(c, r, rows)] = a[at(r, c, columns)];
  return out;
}

void through_tanh(Matrix& grad, const Matrix& output) {
  for (size_t i = 0; i < grad.size(); ++i) grad[i] *= 1 - output[i] * output[i];
}

Matrix loss_gradient(const Matrix& output, const Matrix& target) {
  Matrix grad = output;
  for (size_t i = 0; i < grad.size(); ++i) grad[i] = (output[i] - target[i]) / kBatchRows;
  return grad;
}

constexpr size_t kSquare = kWidth * kWidth;

bool has_gain(int unit) { return unit % 2 == 0; }

Matrix weights_of(const Matrix& all) { return {all.begin(), all.end() - kWidth}; }
Matrix extra_of(const Matrix& all) { return {all.end() - kWidth, all.end()}; }

// `by` and `addends` have one value per column.
void scale_columns(Matrix& values, const Matrix& by) {
  for (size_t i = 0; i < values.size(); ++i) values[i] *= by[i % kWidth];
}
void add_to_columns(Matrix& values, const Matrix& addends) {
  for (size_t i = 0; i < values.size(); ++i) values[i] += addends[i % kWidth];
}
Matrix sum_of_columns(const Matrix& values) {
  Matrix sums(kWidth);
  for (size_t i = 0; i < values.size(); ++i) sums[i % kWidth] += values[i];
  return sums;
}

Matrix product(Matrix one, const Matrix& other) {
  for (size_t i = 0; i < one.size(); ++i) one[i] *= other[i];
  return one;
}

Matrix joined(Matrix one, const Matrix& other) {
  one.insert(one.end(), other.begin(), other.end());
  return one;
}

// Returns the columns of W on this tensor rank (column split), or else its rows.
Matrix cut(const Matrix& full, bool columns, const Mesh& mesh, int tensor) {
  if (mesh.size(Axis::kTensor) == 1) return full;
  const int part = kWidth / mesh.size(Axis::kTensor);
  Matrix local;
  for (int row = 0; row < kWidth; ++row)
    for (int column = 0; column < kWidth; ++column)
      if ((columns ? column : row) / part == tensor) local.push_back(full[at(row, column, kWidth)]);
  return local;
}

size_t first_flat_numel(const Mesh& mesh) {
  return static_cast<size_t>(kWidth * kWidth / mesh.size(Axis::kTensor) / 2 - 1);
}

}  // namespace

const char* variant_name(Variant variant) {
  return variant == Variant::kChain ? "chain" : variant == Variant::kTiedRoot ? "tied" : "frozen";
}

Problem Problem::make(Variant variant, int num_steps) {
  std::mt19937_64 random(7);
  std::normal_distribution<double> normal(0, 1);
  const auto matrix = [&](int rows, double scale) {
    Matrix values(static_cast<size_t>(rows * kWidth));
    for (double& value : values) value = normal(random) * scale;
    return values;
  };
  Problem problem{.variant = variant, .weights = {}, .steps = {}};
  for (int unit = 0; unit < kNumUnits; ++unit) {
    Matrix extra = matrix(1, 0.3);
    if (has_gain(unit)) add_to_columns(extra, Matrix(kWidth, 1.0));
    problem.weights.push_back(joined(matrix(kWidth, 0.4), extra));
  }
  for (int step = 0; step < num_steps; ++step)
    problem.steps.push_back({matrix(kBatchRows, 1), matrix(kBatchRows, 1)});
  return problem;
}

bool Problem::trainable(int unit, size_t element) const {
  if (variant != Variant::kFrozen) return true;
  return unit != 1 && (unit != 2 || element < first_flat_numel(Mesh{}) || element >= kSquare);
}

void Adam::apply(int step, double grad, double& weight, double& mean, double& square) {
  mean = kBeta1 * mean + (1 - kBeta1) * grad;
  square = kBeta2 * square + (1 - kBeta2) * grad * grad;
  const double unbiased_mean = mean / (1 - std::pow(kBeta1, step));
  const double unbiased_square = square / (1 - std::pow(kBeta2, step));
  weight -= kRate * unbiased_mean / (std::sqrt(unbiased_square) + kEps);
}

Trained train_reference(const Problem& problem) {
  Trained out{.weights = problem.weights, .norms = {}, .input_grads = {}};
  std::vector<Matrix>& w = out.weights;
  std::vector<Matrix> mean(kNumUnits, Matrix(kSquare + kWidth));
  std::vector<Matrix> square = mean;
  const bool tied = problem.variant == Variant::kTiedRoot;
  for (size_t step = 0; step < problem.steps.size(); ++step) {
    std::vector<Matrix> hidden = {problem.steps[step].input}, inputs;
    for (int unit = 0; unit < kNumUnits; ++unit) {
      inputs.push_back(hidden.back());
      if (has_gain(unit)) scale_columns(inputs.back(), extra_of(w[unit]));
      hidden.push_back(multiply(inputs.back(), weights_of(w[unit]), kWidth));
      if (!has_gain(unit)) add_to_columns(hidden.back(), extra_of(w[unit]));
      for (double& value : hidden.back()) value = std::tanh(value);
    }
    const Matrix first = weights_of(w[0]);
    const Matrix output =
        tied ? multiply(hidden.back(), transpose(first, kWidth), kWidth) : hidden.back();
    Matrix back = loss_gradient(output, problem.steps[step].target);
    std::vector<Matrix> grads(kNumUnits);
    Matrix of_tied(kSquare);
    if (tied) {
      of_tied = multiply(transpose(back, kWidth), hidden.back(), kBatchRows);
      back = multiply(back, first, kWidth);
    }
    for (int unit = kNumUnits - 1; unit >= 0; --unit) {
      through_tanh(back, hidden[unit + 1]);
      Matrix grad = multiply(transpose(inputs[unit], kWidth), back, kBatchRows);
      Matrix extra = sum_of_columns(back);
      back = multiply(back, transpose(weights_of(w[unit]), kWidth), kWidth);
      if (has_gain(unit)) {
        extra = sum_of_columns(product(back, hidden[unit]));
        scale_columns(back, extra_of(w[unit]));
      }
      if (unit == 0) {
        for (size_t i = 0; i < grad.size(); ++i) grad[i] += of_tied[i];
      }
      grads[unit] = joined(std::move(grad), extra);
    }
    double sum = 0;
    for (int unit = 0; unit < kNumUnits; ++unit) {
      for (size_t i = 0; i < grads[unit].size(); ++i) {
        if (!problem.trainable(unit, i)) continue;
        sum += grads[unit][i] * grads[unit][i];
        Adam::apply(static_cast<int>(step) + 1, grads[unit][i], w[unit][i], mean[unit][i],
                    square[unit][i]);
      }
    }
    out.norms.push_back(std::sqrt(sum));
    out.input_grads.push_back(back);
  }
  return out;
}

ModelDesc describe(Variant variant, const Mesh& mesh, int num_stages) {
  ModelDesc model;
  const int64_t first = static_cast<int64_t>(first_flat_numel(mesh));
  const int64_t second = kWidth * kWidth / mesh.size(Axis::kTensor) - first;
  const auto padded = [&](int64_t numel) {
    return (numel + mesh.data() - 1) / mesh.data() * mesh.data();
  };
  for (int unit = 0; unit < kNumUnits; ++unit) {
    const bool frozen = variant == Variant::kFrozen;
    UnitDesc desc{.name = "block" + std::to_string(unit), .flats = {}};
    desc.flats.push_back({padded(first), Dtype::kBf16, !(frozen && unit == 1)});
    desc.flats.push_back({padded(second), Dtype::kFp32, !(frozen && (unit == 1 || unit == 2))});
    desc.flats.push_back({padded(kWidth), Dtype::kFp32, !(frozen && unit == 1)});
    if (mesh.size(Axis::kTensor) > 1) {
      (has_gain(unit) ? desc.in_backward : desc.in_forward) = {{}};
      for (size_t flat = 0; flat < 2; ++flat) {
        desc.flats[flat].placement.on(Axis::kTensor).layout = Layout::kSharded;
      }
      if (has_gain(unit)) desc.flats[2].placement.on(Axis::kTensor).layout = Layout::kPartial;
    }
    model.units.push_back(desc);
  }
  assume_order(model, variant == Variant::kTiedRoot);
  for (Visit& visit : model.forward) {
    visit.stage = visit.mark == Mark::kEnd ? num_stages - 1 : visit.unit * num_stages / kNumUnits;
  }
  for (Visit& visit : model.backward) {
    visit.stage = visit.mark == Mark::kBegin ? num_stages - 1 : visit.unit * num_stages / kNumUnits;
  }
  return model;
}

std::vector<Matrix> pad_flats(const ModelDesc& model, const Mesh& mesh, int unit,
                              const Matrix& local) {
  const auto middle = local.begin() + static_cast<std::ptrdiff_t>(first_flat_numel(mesh));
  const auto end = local.end() - kWidth;
  std::vector<Matrix> flats = {Matrix(local.begin(), middle), Matrix(middle, end),
                               Matrix(end, local.end())};
  for (size_t flat = 0; flat < kNumFlats; ++flat)
    flats[flat].resize(static_cast<size_t>(model.units[unit].flats[flat].numel));
  return flats;
}

std::vector<Matrix> to_flats(const ModelDesc& model, const Mesh& mesh, int tensor, int unit,
                             const Matrix& weights) {
  Matrix local = cut(weights_of(weights), has_gain(unit), mesh, tensor);
  return pad_flats(model, mesh, unit, joined(std::move(local), extra_of(weights)));
}

Matrix from_flats(const std::vector<Matrix>& flats, const Mesh& mesh) {
  const size_t first = first_flat_numel(mesh);
  const size_t second = static_cast<size_t>(kWidth * kWidth / mesh.size(Axis::kTensor)) - first;
  Matrix local(flats[0].begin(), flats[0].begin() + static_cast<std::ptrdiff_t>(first));
  local.insert(local.end(), flats[1].begin(),
               flats[1].begin() + static_cast<std::ptrdiff_t>(second));
  local.insert(local.end(), flats[2].begin(), flats[2].begin() + kWidth);
  return local;
}

void ChainModel::begin(Batch rows) {
  batch_ = std::move(rows);
  value_ = batch_.input;
  grad_.reset();
  unactivated_ = -1;
  inputs_.assign(kNumUnits, {});
  outputs_.assign(kNumUnits, {});
  extras_.assign(kNumUnits, {});
}

int ChainModel::rows() const { return static_cast<int>(batch_.input.size()) / kWidth; }

const Matrix& ChainModel::activated() {
  if (unactivated_ >= 0) {
    if (!has_gain(unactivated_)) add_to_columns(value_, extras_[unactivated_]);
    for (double& value : value_) value = std::tanh(value);
    outputs_[unactivated_] = value_;
    unactivated_ = -1;
  }
  return value_;
}

// Returns the matrix by which W is multiplied.
Matrix ChainModel::scaled_input(int unit) const {
  Matrix input = inputs_[unit];
  if (has_gain(unit)) scale_columns(input, extras_[unit]);
  return input;
}

void ChainModel::forward(int unit, Mark mark, const Matrix& all) {
  const Matrix weights = weights_of(all);
  if (mark == Mark::kEnd) {
    tied_input_ = activated();
    value_ = multiply(tied_input_, transpose(weights, kWidth), kWidth);
    return;
  }
  inputs_[unit] = activated();
  extras_[unit] = extra_of(all);
  value_ = multiply(scaled_input(unit), weights, static_cast<int>(inputs_[unit].size()) / rows());
  unactivated_ = unit;
}

void ChainModel::arrive(Role role, Matrix values) {
  if (role == Role::kGrad) {
    grad_ = std::move(values);
  } else {
    value_ = std::move(values);
  }
}

Matrix ChainModel::backward(int unit, Mark mark, const Matrix& all) {
  std::deque<Matrix>& kept = kept_[unit];
  if (mark == Mark::kWeights || (mark == Mark::kBegin && !kept.empty())) {
    PENSTOCK_ASSERT(!kept.empty(), "weights before inputs");
    Matrix grad = std::move(kept.front());
    kept.pop_front();
    return grad;
  }
  const bool is_first_input = mark == Mark::kInputs && unit == 0 && kept.empty();
  const bool ties = mark == Mark::kBegin || (is_first_input && !tied_input_.empty());
  Matrix grad = whole_backward(unit, ties, all);
  if (mark != Mark::kInputs) return grad;
  kept.push_back(std::move(grad));
  return {};
}

Matrix ChainModel::whole_backward(int unit, bool ties, const Matrix& all) {
  const Matrix weights = weights_of(all);
  if (!grad_) grad_ = loss_gradient(activated(), batch_.target);
  if (ties) {
    const Matrix grad = multiply(transpose(*grad_, kWidth), tied_input_, rows());
    grad_ = multiply(*grad_, weights, kWidth);
    return joined(grad, Matrix(kWidth));
  }
  PENSTOCK_ASSERT(grad_->size() == outputs_[unit].size(), "backward out of order");
  through_tanh(*grad_, outputs_[unit]);
  const Matrix input = scaled_input(unit);
  const int columns = static_cast<int>(grad_->size()) / rows();
  const Matrix grad =
      multiply(transpose(input, static_cast<int>(input.size()) / rows()), *grad_, rows());
  Matrix extra = has_gain(unit) ? Matrix() : sum_of_columns(*grad_);
  grad_ = multiply(*grad_, transpose(weights, columns), columns);
  if (has_gain(unit)) {
    extra = sum_of_columns(product(*grad_, inputs_[unit]));
    scale_columns(*grad_, extras_[unit]);
  }
  return joined(grad, extra);
}

}  // namespace penstock::plans
