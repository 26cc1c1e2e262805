// Config::resolve(): fills in what follows from the number of ranks.
#include <string>

#include "penstock/config.h"
#include "penstock/error.h"
#include "penstock/plan.h"
#include "src/base/text.h"

namespace penstock {

namespace {

// One copy of the model takes tensor x pipeline x sequence ranks. The number of data ranks follows
// from the world size.
void resolve_mesh(int world_size, MeshConfig* mesh) {
  const std::string where = "[plan::Config::resolve] ";
  const int model = mesh->tensor * mesh->pipeline * mesh->sequence;
  if (world_size < 1 || world_size % model != 0)
    throw ConfigError(concat(where, "mesh.tensor ", mesh->tensor, " x mesh.pipeline ",
                             mesh->pipeline, " x mesh.sequence ", mesh->sequence, " = ", model,
                             " ranks for one copy of the model do not divide ", world_size,
                             " ranks evenly; start a multiple of ", model, " ranks"));
  const int data = world_size / model;
  if (mesh->data != 0 && mesh->data != data)
    throw ConfigError(concat(where, "\"mesh.data\" is ", mesh->data, ", but ", world_size,
                             " ranks with ", model, " per model leave ", data,
                             " data ranks; set it to ", data, ", leave it out, or start ",
                             mesh->data * model, " ranks"));
  mesh->data = data;
  if (mesh->node < 1 || data % mesh->node != 0)
    throw ConfigError(concat(where, "\"mesh.node\" is ", mesh->node, ", which does not divide the ",
                             data,
                             " data-parallel ranks evenly; set it to the number of nodes, a "
                             "divisor of ",
                             data));
  if (mesh->expert > 1 && mesh->sequence > 1)
    throw ConfigError(concat(where, "\"mesh.expert\" is ", mesh->expert,
                             ", which is not supported with \"mesh.sequence\" yet; remove one"));
  if (data / mesh->node % mesh->expert != 0)
    throw ConfigError(
        concat(where, "\"mesh.expert\" is ", mesh->expert, ", which does not divide the ",
               data / mesh->node,
               " data-parallel ranks of a node evenly; expert ranks are data-parallel "
               "ranks of one node. Set it to a divisor of ",
               data / mesh->node));
}

// Computes the missing one of micro, accumulate and global from the other two. Sets nothing if the
// config has no batch size.
void resolve_batch(int64_t data, BatchConfig* batch) {
  const std::string where = "[plan::Config::resolve] ";
  if (batch->global > 0 && (batch->micro == 0 || batch->accumulate == 0)) {
    const bool needs_micro = batch->micro == 0;
    const int64_t known = needs_micro ? batch->accumulate : batch->micro;
    const char* name = needs_micro ? "batch.accumulate " : "batch.micro ";
    if (known < 1 || batch->global % (known * data) != 0)
      throw ConfigError(concat(where, "\"batch.global\" is ", batch->global, ", not a multiple of ",
                               name, known, " x ", data, " data-parallel ranks = ", known * data,
                               "; set it to a multiple of ", known * data));
    (needs_micro ? batch->micro : batch->accumulate) = batch->global / (known * data);
  }
  if (batch->micro == 0) return;  // the config has no batch size
  const int64_t samples = batch->micro * batch->accumulate * data;
  if (batch->global > 0 && batch->global != samples)
    throw ConfigError(concat(where, "\"batch.global\" is ", batch->global, ", but batch.micro ",
                             batch->micro, " x batch.accumulate ", batch->accumulate, " x ", data,
                             " data-parallel ranks = ", samples, "; leave one of the three out"));
  batch->global = samples;
}

}  // namespace

void Config::resolve(int world_size) {
  if (mesh.pipeline == 1 && (parallel.virtual_stages > 1 || !parallel.stages.empty())) {
    throw ConfigError(concat("[plan::Config::resolve] \"parallel.",
                             parallel.stages.empty() ? "virtual_stages" : "stages",
                             "\" is set, but \"mesh.pipeline\" is 1, so there is only one stage"));
  }
  const char* of_tensor_ranks = parallel.cut_logits         ? "cut_logits"
                                : parallel.norms != "whole" ? "norms"
                                : parallel.verify == "all"  ? "verify"
                                                            : nullptr;
  if (mesh.tensor == 1 && of_tensor_ranks != nullptr) {
    throw ConfigError(concat("[plan::Config::resolve] \"parallel.", of_tensor_ranks,
                             "\" is set, but \"mesh.tensor\" is 1, so nothing is cut"));
  }
  if (mesh.sequence == 1 && parallel.sequence != "heads") {
    throw ConfigError(
        "[plan::Config::resolve] \"parallel.sequence\" is set, but \"mesh.sequence\" is 1, so "
        "sequences are not cut");
  }
  if (inference && offload.optimizer == "auto") {
    throw ConfigError(
        "[plan::Config::resolve] \"offload\" is \"auto\", which chooses tiers for training, but "
        "\"inference\" is true. Set \"offload.params\"; `penstock plan --generate` compares its "
        "values");
  }
  const char* of_training = clip > 0                        ? "clip"
                            : batch.accumulate > 1          ? "batch.accumulate"
                            : offload.optimizer != "none"   ? "offload.optimizer"
                            : offload.gradients != "none"   ? "offload.gradients"
                            : activations.checkpoint > 0    ? "activations.checkpoint"
                            : offload.activations != "none" ? "offload.activations"
                            : schedule.type != "none"       ? "schedule"
                            : nonfinite != "error"          ? "nonfinite"
                                                            : nullptr;
  if (inference && of_training != nullptr) {
    throw ConfigError(concat("[plan::Config::resolve] \"", of_training,
                             "\" is set, but \"inference\" is true, so nothing trains"));
  }
  if (!monitor.machine.empty()) read_machine(monitor.machine, Machine());
  resolve_mesh(world_size, &mesh);
  resolve_batch(mesh.data, &batch);
}

}  // namespace penstock
