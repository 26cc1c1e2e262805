"""Synchronisations that are left out beside a device, memory that goes too early, and reads by the
host of what is not its own: each must make a test on the simulated accelerator fail."""

from __future__ import annotations

from planted import Mutation, Program, Pytest, gtest

# Random tables on the device, each in a process with one schedule of late kernels.
TABLES = Program("tests/device/device_tables_test", ("--draws", "0:80"))
MEMORY = gtest("tests/device/memory_test", "MemoryTest.*")
ON_ONE_RANK = Pytest(("tests/device/test_device_activations.py", "-k", "world1"), ("_sim",))

FAULTS = "tests/device/test_device_faults.py"
CONNECTIONS = "tests/device/test_device_connections.py"
HOST_MEMORY = "tests/device/test_device_host_memory.py"
BORDER = "tests/device/test_device_border.py"
OPTIMIZERS = "tests/device/test_device_optimizers.py"
PROFILE = "tests/device/test_device_profile.py"

LANE, FENCE, KERNELS = "src/device/lane.cpp", "src/device/fence.cpp", "src/device/kernels.cpp"
ARENA, TRAFFIC, CHANNEL = "src/mem/arena.cpp", "src/mem/disk_traffic.cpp", "src/comm/channel.cpp"
WALK, PARAMS, FLAT = "src/exec/mesh_walk.cpp", "src/exec/params.cpp", "src/exec/flat.cpp"
GRADIENTS, NORM = "src/exec/gradients.cpp", "src/exec/norm.cpp"
STORE_GROUP = "src/comm/store_group.cpp"
MESSAGES = "src/parallel/tensor_messages.cpp"
STAGE_LANES = "src/engine/mesh/stage_lanes.cpp"
SHELF, SAVE = "src/activations/shelf.cpp", "src/ckpt/save.cpp"
DEVICE_STEP = "src/optim/device_step.cpp"
CORE = "python/src/core.cpp"
NODES = "src/exec/between_nodes.cpp"


def mesh(case: str) -> Pytest:
    return Pytest(("tests/device/test_device_meshes.py", "-k", case), ("_sim",))


def late(case: str) -> Pytest:
    return Pytest(("tests/device/test_device_late_copies.py", "-k", case), ("_sim",))


def nodes(case: str) -> Pytest:
    return Pytest(("tests/device/test_device_nodes.py", "-k", case), ("_sim",))


BUDGETS = Pytest((PROFILE, "-k", "zero3_groups"), ("_sim",))

BESIDE_A_DEVICE = [
    Mutation(
        "a lane's work does not come after what was queued before it",
        LANE,
        "      if (task.after) task.after->block(*stream_);\n",
        "",
        TABLES,
    ),
    Mutation(
        "who waits for a lane does not wait for its stream",
        FENCE,
        "  if (state_->queued) state_->queued->block(state_->device->current());\n",
        "",
        TABLES,
    ),
    Mutation(
        "the host does not wait for what is on its way to it",
        FENCE,
        """  if (state_->error) std::rethrow_exception(state_->error);
  if (state_->queued) state_->queued->synchronize();
""",
        "  if (state_->error) std::rethrow_exception(state_->error);\n",
        MEMORY,
    ),
    Mutation(
        "pinned memory is used again before its copy has ended",
        ARENA,
        "    if (chosen->after && kind_ == MemoryKind::kPinned) chosen->after->synchronize();\n",
        "",
        TABLES,
    ),
    Mutation(
        "device memory is used again by a stream that its last user is not before",
        ARENA,
        "    if (chosen->after && kind_ == MemoryKind::kDevice) "
        "chosen->after->block(device_.current());\n",
        "",
        MEMORY,
    ),
    Mutation(
        "peers are sent what has not come from the device yet",
        CHANNEL,
        "  device->synchronize();\n",
        "",
        TABLES,
    ),
    Mutation(
        "the host works on values that are on their way to it",
        WALK,
        "    if (host_reads(i)) tiers_.computes.synchronize();\n",
        "",
        TABLES,
    ),
    Mutation(
        "a sum on the host is widened before it is there",
        GRADIENTS,
        "        if (sum->one().tier != Tier::kDevice) done_.wait_on_host();"
        "  // widen() reads it on the host\n",
        "",
        Program(TABLES.path, ("--draws", "270:280")),
    ),
    Mutation(
        "a reduction's buffers go while it runs",
        GRADIENTS,
        """  try {
    done_.wait();
  } catch""",
        """  try {
  } catch""",
        TABLES,
    ),
    Mutation(
        "the norm does not wait for gradients that come to the host",
        NORM,
        "  if (!rank_.cells.grads_stay_on_device()) arrive_on_host(rank_, gradients_);\n",
        "",
        TABLES,
    ),
    Mutation(
        "a unit computes before its parameters are there",
        PARAMS,
        """void Params::settle(UnitState& unit) {
  unit.param_ready.wait();
""",
        "void Params::settle(UnitState& unit) {\n",
        TABLES,
    ),
    Mutation(
        "a disk is written what has not come from the device yet",
        TRAFFIC,
        "  if (!tiers_.computes.is_host()) tiers_.computes.synchronize();"
        "  // work that fills the buffer\n",
        "",
        TABLES,
    ),
    Mutation(
        "a save writes what has not come from the device yet",
        SAVE,
        "  if (!tiers_.computes.is_host()) tiers_.computes.synchronize();\n",
        "",
        TABLES,
    ),
    Mutation(
        "the host copies a device's memory itself",
        KERNELS,
        """  if (bytes == 0) return;
  if (on_host(to, from)) {""",
        """  if (bytes == 0) return;
  if (on_host(to, to)) {""",
        TABLES,
    ),
    Mutation(
        "the host zeroes a device's memory itself",
        KERNELS,
        "  if (at.device == nullptr) {\n    std::memset",
        "  if (at.data != nullptr) {\n    std::memset",
        TABLES,
    ),
    Mutation(
        "a sum on the device is not zeroed where nothing is written",
        GRADIENTS,
        "  if (buffer.data().device != nullptr) device::zero(buffer.data(), buffer.bytes());\n",
        "  static_cast<void>(buffer);\n",
        TABLES,
    ),
    Mutation(
        "saved inputs leave before they are computed",
        SHELF,
        "  before.block(*stream_);\n",
        "",
        ON_ONE_RANK,
    ),
    Mutation(
        "saved inputs are let go while they leave",
        SHELF,
        "  device_.used_on((to.is_cpu() ? from : to).storage().data_ptr(), *stream_);\n",
        "",
        ON_ONE_RANK,
    ),
    Mutation(
        "a unit is computed again before its inputs are back",
        SHELF,
        "  if (came_) came_->block(shelf_->device_.current());\n  return back_",
        "  return back_",
        ON_ONE_RANK,
    ),
    Mutation(
        "saved inputs go to disk before they are in memory",
        SHELF,
        "  copied_->synchronize();\n  copied_.reset();",
        "  copied_.reset();",
        ON_ONE_RANK,
    ),
    Mutation(
        "what the device waits for does not end with the exchanges",
        STORE_GROUP,
        "  back_ends().abort(why);\n",
        "  static_cast<void>(why);\n",
        Pytest((FAULTS, "-k", "weights"), ("_sim",)),
    ),
    Mutation(
        "nobody hears that a neighbour's process has ended",
        "src/comm/connection_watch.cpp",
        '      cut(concat("the connection',
        '      static_cast<void>(concat("the connection',
        Pytest((FAULTS, "-k", "at_once"), ("_sim",)),
    ),
    Mutation(
        "nobody looks at how long the device takes",
        STORE_GROUP,
        "return std::min(ask(*board), look()); });\n",
        "static_cast<void>(&StoreGroup::look); return ask(*board); });\n",
        Pytest((CONNECTIONS, "-k", "waits_alone"), ("_sim",)),
    ),
    Mutation(
        "lanes launch in any order",
        WALK,
        " turn->wait();\n",
        " static_cast<void>(turn);\n",
        Pytest((CONNECTIONS, "-k", "one_order"), ("_sim",)),
    ),
    Mutation(
        "ranks connect in their first collective",
        "src/comm/group.cpp",
        "    made->connect(device, time_to_connect());\n",
        "    static_cast<void>(device);\n",
        Pytest((CONNECTIONS, "-k", "do_not_connect"), ("_sim",)),
    ),
    Mutation(
        "a rank that closes waits for the others' back ends",
        "src/comm/device_collectives.cpp",
        "    call([](c10d::Backend& it) { it.shutdown(); }, *device_, kShutDown);\n",
        "    back_end_->shutdown();\n    static_cast<void>(kShutDown);\n",
        Pytest((CONNECTIONS, "-k", "closes_alone"), ("_sim",)),
    ),
    Mutation(
        "NCCL's watchdog is started",
        "python/penstock/front/device_backends.py",
        "        with _environment(_UNWATCHED):\n",
        "        with _environment({}):\n",
        Pytest(("tests/python/test_device_backends.py",)),
    ),
    Mutation(
        "the host does not wait for copies of memory that is not pinned",
        KERNELS,
        "at::globalContext().isPinnedPtr(host.const_data_ptr(), there.device().type())",
        "host.defined() && there.defined()",
        Pytest((HOST_MEMORY, "-k", "goes_at_once"), ("_sim",)),
    ),
    Mutation(
        "masters on the host are pinned",
        "src/exec/executor.cpp",
        "  if (state_stays_on_host(rank_)) tiers",
        "  if (state_stays_on_host(rank_) && rank_.units.empty()) tiers",
        Pytest((HOST_MEMORY, "-k", "not_pinned"), ("_sim",)),
    ),
    Mutation(
        "pinned memory begins where the allocator says",
        ARENA,
        "  if (address(data) % kBlockBytes == 0) return data;\n",
        "  if (address(data) % kBlockBytes < kBlockBytes) return data;\n",
        Pytest((HOST_MEMORY, "-k", "begin_with_a_page"), ("_sim",)),
    ),
    Mutation(
        "the host waits for each buffer of a recomputed unit",
        "python/penstock/front/recompute.py",
        " or _is_kept(buffer)",
        "",
        Pytest((HOST_MEMORY, "-k", "wait_for_nothing"), ("_sim",)),
    ),
    Mutation(
        "a training forward runs on any stream",
        "src/engine/step/core_state.cpp",
        "stream && tiers.computes.current() != *stream)",
        "stream && closed)",
        Pytest((BORDER, "-k", "another_stream"), ("_sim",)),
    ),
    Mutation(
        "a parameter without gradient delays its rank's reductions",
        "src/engine/step/core_state.cpp",
        "(!own.expected || only_use) && unit != 0",
        "(!own.expected || (only_use && closed)) && unit != 0",
        Pytest((CONNECTIONS, "-k", "without_gradient"), ("_sim",)),
    ),
    Mutation(
        "engines on a device launch in orders of their own",
        "src/comm/launch_order.cpp",
        "  if (turns == nullptr) known = turns",
        "  known = turns",
        gtest("src/comm/comm_test", "LaunchOrder.*"),
    ),
    Mutation(
        "edits of weights on a device are not searched",
        NORM,
        "    left[i]->edited = answers[num_squares + num_sums + i] != 0.0;\n",
        "    left[i]->edited = false;\n",
        Pytest((OPTIMIZERS, "-k", "reach_their_masters"), ("_sim",)),
    ),
    Mutation(
        "a large layer is updated up to the end of its first call",
        DEVICE_STEP,
        "      room = kTogether;\n",
        "      room = kTogether;\n      run.range.numel = 0;\n",
        Pytest((OPTIMIZERS, "-k", "large_layer"), ("_sim",)),
    ),
    Mutation(
        "new weights of neighbours of another group are not published",
        DEVICE_STEP,
        "        .copy_(view(range, range.master, Dtype::kFp32, numel));",
        "        .narrow(0, 0, range.numel)\n"
        "        .copy_(view(range, range.master, Dtype::kFp32, range.numel));",
        Pytest((OPTIMIZERS, "-k", "two_groups"), ("_sim",)),
    ),
    Mutation(
        "the host adds a piece of gradients before it has come",
        KERNELS,
        "    here.arrived->synchronize();\n",
        "",
        Pytest((HOST_MEMORY, "-k", "added"), ("_sim",)),
    ),
    Mutation(
        "the norm makes fp64 copies of all gradients",
        KERNELS,
        "2, std::nullopt, false, at::kFloat);",
        "2, std::nullopt, false, at::kDouble);",
        BUDGETS,
    ),
    Mutation(
        "a sum of gradients takes several passes",
        KERNELS,
        "rounds_once && !sum.accumulate",
        "rounds_once && sum.accumulate",
        BUDGETS,
    ),
    Mutation(
        "weights are published from copies of their masters",
        DEVICE_STEP,
        ".copy_(view(range, range.master, Dtype::kFp32, numel));",
        ".copy_(view(range, range.master, Dtype::kFp32, numel).clone());",
        BUDGETS,
    ),
    Mutation(
        "gradients are in no account",
        ARENA,
        "  count(account, bytes);\n",
        "  if (account != Account::kGrad) count(account, bytes);\n",
        BUDGETS,
    ),
    Mutation(
        "each step takes new device memory",
        ARENA,
        "  unused_[slot].push_front(std::move(unused));\n",
        "  if (kind_ == MemoryKind::kDevice)\n"
        "    return static_cast<void>(unused.data.release_context());\n"
        "  unused_[slot].push_front(std::move(unused));\n",
        BUDGETS,
    ),
    Mutation(
        "each step pins new memory",
        ARENA,
        "  unused_[slot].push_front(std::move(unused));\n",
        "  if (kind_ == MemoryKind::kPinned)\n"
        "    return static_cast<void>(unused.data.release_context());\n"
        "  unused_[slot].push_front(std::move(unused));\n",
        Pytest((PROFILE, "-k", "host_gradients"), ("_sim",)),
    ),
    Mutation(
        "copies of buffers cross to the host and back",
        "python/penstock/front/recompute.py",
        "buffer.detach().clone())",
        "buffer.detach().cpu().to(buffer.device))",
        Pytest((PROFILE, "-k", "recomputed_buffers"), ("_sim",)),
    ),
    Mutation(
        "model ranks sum gradients that are on their way to the host",
        GRADIENTS,
        "  flat.uncount();\n  if (sum.data().device == nullptr) arrive_on_host(rank_, *this);\n",
        "  flat.uncount();\n",
        mesh("gradients_on_the_host"),
    ),
    Mutation(
        "memory of a message is used again while it is sent",
        MESSAGES,
        "  if (!values.is_cpu()) computes_.used_on(values.storage().data_ptr(), "
        "computes_.current());\n",
        "",
        mesh("memory_of_messages"),
    ),
    Mutation(
        "memory of a message is used again while a stage computes with it",
        STAGE_LANES,
        "    computes_.used_on(tensor.storage().data_ptr(), computes_.current());"
        "  // the lane allocated it\n",
        "",
        mesh("memory_of_messages"),
    ),
    Mutation(
        "two ranks launch the messages of both directions in orders of their own",
        STAGE_LANES,
        "  connect(!computes.is_host() && group->device_groups());\n",
        "  connect(false);\n",
        mesh("launch_messages"),
    ),
    Mutation(
        "each event of a device is made anew",
        "src/device/stream_event.cpp",
        "    UnusedEvents::get().give_back(std::move(event_));\n",
        "",
        Pytest((PROFILE, "-k", "one_wait"), ("_sim",)),
    ),
    Mutation(
        "an all-to-all is waited for as if it always made a work",
        "src/comm/device_collectives.cpp",
        """if (const auto work = back_end_->alltoall_base(received, sent, equal, equal, options)) {
    work->wait();
  }
""",
        "back_end_->alltoall_base(received, sent, equal, equal, options)->wait();\n",
        Pytest((PROFILE, "-k", "one_wait"), ("_sim",)),
    ),
    Mutation(
        "a unit's begin keeps the interpreter's lock while it waits for the gather lane",
        CORE,
        '.def("unit_begin", &Core::unit_begin, NoGil())',
        '.def("unit_begin", &Core::unit_begin)',
        Pytest((FAULTS, "-k", "weights"), ("_sim",)),
    ),
    Mutation(
        "ranks connect with the interpreter's lock",
        CORE,
        'py::arg("nodes"), NoGil())',
        'py::arg("nodes"))',
        Pytest((CONNECTIONS, "-k", "closes_alone"), ("_sim",)),
    ),
    Mutation(
        "every rank of a host picks device 0",
        "python/penstock/front/training_device.py",
        "    return int(local) % count if now == 0 and local.isdigit() else now\n",
        "    return now\n",
        Pytest(("tests/device/test_drop_in_devices.py", "-k", "loops_on_a_device"), ("_sim",)),
    ),
    Mutation(
        "the model's thread stays on device 0",
        "src/exec/rank.cpp",
        "  tiers.computes.make_current();",
        "",
        Pytest((BORDER, "-k", "no_context"), ("_sim",)),
    ),
    Mutation(
        "memory is given back on a thread of another device",
        ARENA,
        "  const c10::OptionalDeviceGuard guard(on_device());\n  in_use_ -= bytes;\n",
        "  in_use_ -= bytes;\n",
        Pytest((BORDER, "-k", "no_context"), ("_sim",)),
    ),
    Mutation(
        "optimizer state is in the account of parameters",
        "src/exec/gathered_values.cpp",
        "rank_.traffic.make_room(buffers[i], mem::Account::kOptim);",
        "rank_.traffic.make_room(buffers[i], mem::Account::kParam);",
        Pytest((HOST_MEMORY, "-k", "not_pinned"), ("_sim",)),
    ),
    Mutation(
        "an update widens its gradients to a temporary first",
        DEVICE_STEP,
        "      at::mul_out(wide, own, *factor);\n",
        "      at::mul_out(wide, own.to(at::kFloat), *factor);\n",
        BUDGETS,
    ),
    Mutation(
        "a recomputed unit runs to its end",
        "python/penstock/front/recompute.py",
        "checkpoint(run, *tensors, use_reentrant=False)",
        "checkpoint(run, *tensors, use_reentrant=False, early_stop=False)",
        Pytest((PROFILE, "-k", "recomputed_buffers"), ("_sim",)),
    ),
    Mutation(
        "events of one device are used on another",
        "src/device/stream_event.cpp",
        """    std::vector<c10::Event>& events = events_[device];
    if (events.empty()) return c10::Event(device.type());
    c10::Event event = std::move(events.back());
    events.pop_back();
    return event;
  }

  void give_back(c10::Event event) {
    const std::lock_guard lock(mutex_);
    events_[event.device()].push_back(std::move(event));
""",
        """    std::vector<c10::Event>& events = events_[c10::Device(device.type())];
    if (events.empty()) return c10::Event(device.type());
    c10::Event event = std::move(events.back());
    events.pop_back();
    return event;
  }

  void give_back(c10::Event event) {
    const std::lock_guard lock(mutex_);
    events_[c10::Device(event.device().type())].push_back(std::move(event));
""",
        Program(TABLES.path, ("--draws", "270:280")),
    ),
    Mutation(
        "a view that outlives gathered() is copied as if it were host memory",
        FLAT,
        "storage->device().is_cpu() ? nullptr : &computes;",
        "computes.is_host() ? &computes : rest().one().data().device;",
        late("views"),
    ),
    Mutation(
        "the host writes a gradient before the device's copy has arrived",
        GRADIENTS,
        "still be queued.\n  if (sum.data().device == nullptr) arrive_on_host(rank_, *this);\n",
        "still be queued.\n",
        late("set_grads or grad_none"),
    ),
    Mutation(
        "the host reads state that the device has not sent back",
        "src/exec/updates.cpp",
        "if (for_host && comes_back)",
        "if (!for_host && comes_back)",
        late("state or load"),
    ),
    Mutation(
        "communicators are aborted one after another",
        "src/comm/device_backends.cpp",
        "std::async(std::launch::async, [one]",
        "std::async(std::launch::deferred, [one]",
        Pytest((FAULTS, "-k", "killed"), ("_sim",)),
    ),
    Mutation(
        "each piece of a gather between nodes overwrites the first",
        NODES,
        "char* const to = full + (i * numel + begin)",
        "char* const to = full + (i * numel)",
        nodes("pieces"),
    ),
    Mutation(
        "values between nodes are gathered in host memory",
        NODES,
        "return rank.connected && !place.partial()",
        "return !rank.connected && !place.partial()",
        nodes("zero3"),
    ),
    Mutation(
        "after a fault, values are gathered over connections that are aborted",
        "src/exec/gathered_values.h",
        "    devices_fail_ = true;\n",
        "",
        nodes("fault"),
    ),
]
