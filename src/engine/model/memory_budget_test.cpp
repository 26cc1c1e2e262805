#include "src/engine/model/memory_budget.h"

#include <gtest/gtest.h>

namespace penstock::engine {
namespace {

constexpr int64_t kNone = Room::kNoLimit;

struct RoomCase {
  const char* name;
  MemoryConfig budgets;
  std::vector<AvailableMemory> found;
  Room room;
};

const RoomCase kCases[] = {
    {"device and host share the memory found", {}, {{"a", 100, 0, 50}}, {kNone, kNone, 50, 100}},
    {"ranks of a machine share its memory; the memory of their parameters becomes free",
     {},
     {{"a", 100, 10, 50}, {"a", 100, 10, 50}},
     {kNone, kNone, 25, 60}},
    {"the least memory per rank counts",
     {},
     {{"a", 100, 0, 50}, {"a", 90, 0, 50}, {"b", 46, 2, 20}},
     {kNone, kNone, 20, 45}},
    {"a device budget alone does not change the memory found",
     {.device_bytes = 30},
     {{"a", 100, 0, 50}},
     {30, kNone, 50, 100}},
    {"a host budget alone is shared", {.host_bytes = 30}, {{"a", 100, 0, 50}}, {kNone, 30, 50, 30}},
    {"a device with its own memory takes none from the host",
     {},
     {{.host = "a", .memory = 100, .disk = 50, .device = 0, .on_device = 70}},
     {70, 100, 50, kNone}},
    {"a host budget beside such a device",
     {.host_bytes = 30},
     {{.host = "a", .memory = 100, .disk = 50, .device = 0, .on_device = 70}},
     {70, 30, 50, kNone}},
    {"a budget of such a device",
     {.device_bytes = 20},
     {{.host = "a", .memory = 100, .disk = 50, .device = 0, .on_device = 70}},
     {20, 100, 50, kNone}},
    {"the ranks of one device share it",
     {},
     {{.host = "a", .memory = 100, .disk = 50, .device = 0, .on_device = 70},
      {.host = "a", .memory = 100, .disk = 50, .device = 0, .on_device = 70},
      {.host = "a", .memory = 100, .disk = 50, .device = 1, .on_device = 60},
      {.host = "b", .memory = 400, .disk = 200, .device = 0, .on_device = 90}},
     {35, 33, 16, kNone}},
    {"both budgets apply as given",
     {.device_bytes = 300, .host_bytes = 400},
     {{"a", 100, 0, 50}},
     {300, 400, 50, kNone}},
};

TEST(Room, BudgetsAndWhatIsFound) {
  for (const RoomCase& c : kCases) {
    const Room room = room_of(c.budgets, c.found);
    EXPECT_EQ(room.device, c.room.device) << c.name;
    EXPECT_EQ(room.host, c.room.host) << c.name;
    EXPECT_EQ(room.disk, c.room.disk) << c.name;
    EXPECT_EQ(room.memory, c.room.memory) << c.name;
  }
}

TEST(Room, WhatARankFoundTravelsAsText) {
  const AvailableMemory found =
      AvailableMemory::parse(AvailableMemory{"host-1", 7, 8, 9, 10, 3, 12, 11}.text());
  EXPECT_EQ(found.host, "host-1");
  EXPECT_EQ(found.memory, 7);
  EXPECT_EQ(found.model, 8);
  EXPECT_EQ(found.disk, 9);
  EXPECT_EQ(found.pid, 10);
  EXPECT_EQ(found.device, 3);
  EXPECT_EQ(found.on_device, 12);
  EXPECT_EQ(found.when_ns, 11);
}

}  // namespace
}  // namespace penstock::engine
