#pragma once
// The model of the plan tests: units y = tanh((x * gain) W) and y = tanh(x W + bias) alternate in a
// chain. Adam trains it with the squared error on a global batch. An independent trainer of the
// same model uses no plans and no ranks. Over tensor ranks, units of the first kind are cut by
// columns, and each rank has an addend of the gain's gradient. Units of the second kind are cut by
// rows, and the bias's gradient is equal on all ranks.
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "src/place/mesh.h"
#include "src/plan/model_desc.h"
#include "src/plan/table.h"

namespace penstock::plans {

inline constexpr int kWidth = 8;        // W is kWidth x kWidth; a gain or a bias has kWidth values
inline constexpr int kNumUnits = 4;     // even: column and row splits alternate
inline constexpr int kBatchRows = 120;  // rows of the global batch; divisible by 2, 3, 5 and 8

enum class Variant { kChain, kTiedRoot, kFrozen };
const char* variant_name(Variant variant);

using Matrix = std::vector<double>;  // row-major; for a unit: W, then the gain or bias

struct Batch {
  Matrix input, target;
};

// Everything that a run starts from. It is the same for the reference and for any mesh.
struct Problem {
  Variant variant = Variant::kChain;
  std::vector<Matrix> weights;  // by unit
  std::vector<Batch> steps;     // one global batch per training step

  static Problem make(Variant variant, int num_steps);
  bool trainable(int unit, size_t element) const;  // `element` counts in the full matrix
};

struct Adam {
  static constexpr double kRate = 0.05, kBeta1 = 0.9, kBeta2 = 0.99, kEps = 1e-4;
  static void apply(int step, double grad, double& weight, double& mean, double& square);
};

// The final weights, and for each step the gradient norm and the gradient of the input.
struct Trained {
  std::vector<Matrix> weights;
  std::vector<double> norms;
  std::vector<Matrix> input_grads;
};
Trained train_reference(const Problem& problem);

// A tensor rank's part of a unit's W is in two flats of unequal size; the gain or bias is in a
// third.
inline constexpr int kNumFlats = 3;
// Returns the planner's description of the model, with stages of equal size.
ModelDesc describe(Variant variant, const Mesh& mesh, int num_stages = 1);
// Converts one tensor rank's part of a unit to padded flats, and back.
std::vector<Matrix> to_flats(const ModelDesc& model, const Mesh& mesh, int tensor, int unit,
                             const Matrix& weights);
Matrix from_flats(const std::vector<Matrix>& flats, const Mesh& mesh);
std::vector<Matrix> pad_flats(const ModelDesc& model, const Mesh& mesh, int unit,
                              const Matrix& local);

// The arithmetic of one rank. The activation is applied when a value is used, so that a sum over
// tensor ranks may come before it.
class ChainModel {
 public:
  ChainModel(const ModelDesc& model, const Mesh& mesh) : model_(model), mesh_(mesh) {}

  void begin(Batch rows);  // the rows of one micro-batch
  void forward(int unit, Mark mark, const Matrix& weights);
  // Returns the weights' gradient. The first part of a split backward keeps it for the second.
  Matrix backward(int unit, Mark mark, const Matrix& weights);
  // leave() returns the values for the next stage of a pipeline or, in backward, for the previous
  // stage. arrive() takes such values.
  Matrix leave() { return grad_ ? *grad_ : activated(); }
  void arrive(Role role, Matrix values);
  // Returns the values that a sum over tensor ranks adds up: outputs in forward, input gradients in
  // backward.
  Matrix& in_flight() { return grad_ ? *grad_ : value_; }

 private:
  Matrix whole_backward(int unit, bool ties, const Matrix& all);
  const Matrix& activated();
  int rows() const;
  Matrix scaled_input(int unit) const;

  const ModelDesc& model_;
  const Mesh mesh_;
  Batch batch_;
  Matrix value_;
  std::optional<Matrix> grad_;
  int unactivated_ = -1;  // the unit whose output has not passed through tanh yet
  std::vector<Matrix> inputs_, outputs_, extras_;  // extras: gains and biases, as last used
  Matrix tied_input_;
  std::map<int, std::deque<Matrix>> kept_;  // by unit: gradients of the weights
};

}  // namespace penstock::plans
