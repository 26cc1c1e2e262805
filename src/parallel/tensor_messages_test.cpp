#include "src/parallel/tensor_messages.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <thread>

#include "penstock/error.h"

namespace penstock::parallel {
namespace {

std::vector<TensorMessage> examples() {
  const at::Tensor values = at::arange(24, at::kFloat).view({2, 3, 4});
  return {{"first", {values, at::ones({3}, at::kLong)}},
          {"first", {values * 2, at::zeros({3}, at::kLong)}},  // repeats the header
          {"longer", {values.slice(1, 0, 2), at::Tensor(), at::ones({2}, at::kBFloat16)}},
          {"", {at::zeros({0, 5}), values.transpose(0, 2)}},
          {"nothing", {}},
          {"scalar", {at::ones({}, at::kBool)}}};
}

// Returns the messages that rank 1 receives if it names the lane `name`; rank 0 names it "lane".
std::vector<TensorMessage> told(const std::string& name) {
  auto groups = Group::threads(2, std::chrono::seconds(2));
  std::vector<TensorMessage> received;
  std::exception_ptr error;
  std::thread sender([&] {
    Messages messages(groups[0], 0, {1}, "lane");
    try {
      for (const TensorMessage& one : examples()) messages.send("message", one);
    } catch (const RuntimeFault&) {  // no rank receives this message
    }
  });
  Messages messages(groups[1], 0, {1}, name);
  try {
    for (size_t i = 0; i < examples().size(); ++i) received.push_back(messages.receive("message"));
  } catch (...) {
    error = std::current_exception();
  }
  sender.join();
  for (const auto& group : groups) group->close();
  if (error) std::rethrow_exception(error);
  return received;
}

TEST(Messages, ArriveAsTheyWereSent) {
  const std::vector<TensorMessage> sent = examples(), received = told("lane");
  for (size_t i = 0; i < sent.size(); ++i) {
    EXPECT_EQ(received[i].text, sent[i].text);
    ASSERT_EQ(received[i].tensors.size(), sent[i].tensors.size());
    for (size_t t = 0; t < sent[i].tensors.size(); ++t) {
      const at::Tensor &one = received[i].tensors[t], &other = sent[i].tensors[t];
      ASSERT_EQ(one.defined(), other.defined());
      if (!one.defined()) continue;
      EXPECT_EQ(one.scalar_type(), other.scalar_type());
      EXPECT_EQ(one.sizes(), other.sizes());
      EXPECT_TRUE(at::equal(one, other));
      EXPECT_TRUE(one.is_contiguous());
    }
  }
}

TEST(Messages, OfAnotherLaneAreNotMixedUp) { EXPECT_THROW(told("other"), RuntimeFault); }

}  // namespace
}  // namespace penstock::parallel
