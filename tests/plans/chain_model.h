#pragma once
// The model that plans are tried on: a chain of y = tanh((x * gain) W) and y = tanh(x W + bias) in
// turns, squared error on a global batch, trained by Adam; and an independent trainer of the same
// model that knows no plans and no ranks. Over tensor ranks the first kind is cut by columns, and
// its gain has addends of its gradient on all of them; the second kind by rows, and its bias has a
// gradient that is equal on all.
#include <optional>
#include <string>
#include <vector>

#include "src/place/mesh.h"
#include "src/plan/model_desc.h"
#include "src/plan/table.h"

namespace penstock::plans {

inline constexpr int kWidth = 8;        // W is kWidth x kWidth, a gain or a bias is kWidth
inline constexpr int kNumUnits = 4;     // even: column and row splits alternate
inline constexpr int kBatchRows = 120;  // of the global batch, so that 2, 3, 5 and 8 divide them

enum class Variant { kChain, kTiedRoot, kFrozen };
const char* variant_name(Variant variant);

using Matrix = std::vector<double>;  // row-major; of a unit: W, then its gain or bias

struct Batch {
  Matrix input, target;
};

// Everything a run starts from: the same for the reference and for any mesh.
struct Problem {
  Variant variant = Variant::kChain;
  std::vector<Matrix> weights;  // by unit
  std::vector<Batch> steps;     // one global batch per training step

  static Problem make(Variant variant, int num_steps);
  bool trainable(int unit, size_t element) const;  // element of the full matrix
};

struct Adam {
  static constexpr double kRate = 0.05, kBeta1 = 0.9, kBeta2 = 0.99, kEps = 1e-4;
  static void apply(int step, double grad, double& weight, double& mean, double& square);
};

// Final weights; the gradient norm and the gradient of the input of each step.
struct Trained {
  std::vector<Matrix> weights;
  std::vector<double> norms;
  std::vector<Matrix> input_grads;
};
Trained train_reference(const Problem& problem);

// A unit's W, cut for one tensor rank, is in two flats of uneven size, its gain or bias in a third.
inline constexpr int kNumFlats = 3;
// The units in stages of equal size.
ModelDesc describe(Variant variant, const Mesh& mesh, int num_stages = 1);
// The flats (padded) of one tensor rank's part of a unit, and back.
std::vector<Matrix> to_flats(const ModelDesc& model, const Mesh& mesh, int tensor, int unit,
                             const Matrix& weights);
Matrix from_flats(const std::vector<Matrix>& flats, const Mesh& mesh);
std::vector<Matrix> pad_flats(const ModelDesc& model, const Mesh& mesh, int unit,
                              const Matrix& local);

// The arithmetic of one rank. The activation is applied when a value is used, so that a sum over
// tensor ranks may come between.
class ChainModel {
 public:
  ChainModel(const ModelDesc& model, const Mesh& mesh) : model_(model), mesh_(mesh) {}

  void begin(Batch rows);  // of one micro-batch
  void forward(int unit, Mark mark, const Matrix& weights);
  Matrix backward(int unit, Mark mark, const Matrix& weights);  // the gradient of the weights
  // What goes on to the next stage of a pipeline, or to the one before in backward; and what comes.
  Matrix leave() { return grad_ ? *grad_ : activated(); }
  void arrive(Role role, Matrix values);
  // What a sum over tensor ranks is about: outputs in forward, input gradients in backward.
  Matrix& in_flight() { return grad_ ? *grad_ : value_; }

 private:
  const Matrix& activated();
  int rows() const;
  Matrix scaled_input(int unit) const;

  const ModelDesc& model_;
  const Mesh mesh_;
  Batch batch_;
  Matrix value_;
  std::optional<Matrix> grad_;
  int unactivated_ = -1;  // the unit whose output is still to pass through tanh
  std::vector<Matrix> inputs_, outputs_, extras_;  // extras: gains and biases, as last used
  Matrix tied_input_;
};

}  // namespace penstock::plans
