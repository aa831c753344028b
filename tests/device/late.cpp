// A device that is late, for tests on machines without an accelerator.
//
// Its memory is not the host's: an address of it cannot be read. Copies that are asked for without waiting happen
// as late as they may: when a later operation of their stream, an event or somebody who waits needs them. Memory
// that is freed is overwritten at once. Whoever uses on one stream what another one wrote, and has not waited for
// it, is told so. It computes by asking the CPU, so its numbers are the CPU's; its random numbers are its own.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <algorithm>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/mman.h>
#include <torch/library.h>

#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <mutex>

extern "C" { // of the interpreter that loads this; its headers may not be there
int PyGILState_Check();
void* PyEval_SaveThread();
void PyEval_RestoreThread(void*);
}

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using Clock = std::map<int64_t, uint64_t>; // by stream: up to which operation of it

constexpr auto LATE = DeviceType::PrivateUse1;
constexpr DeviceIndex DEVICES = 2;
constexpr size_t SPAN = size_t(1) << 36, UNIT = 512;

std::recursive_mutex lock;

// Nobody waits for it with the interpreter: whoever has it may need that, to let go of a tensor for one.
struct Held {
  Held() {
    if (lock.try_lock()) return;
    void* interpreter = PyGILState_Check() ? PyEval_SaveThread() : nullptr;
    lock.lock();
    if (interpreter) PyEval_RestoreThread(interpreter);
  }
  ~Held() { lock.unlock(); }
};

thread_local DeviceIndex current = 0;
thread_local int64_t currents[DEVICES] = {0, 0};
thread_local bool in_kernel = false;
std::atomic<int64_t> waits{0}; // how often the host had to wait for the device

void join(Clock& one, const Clock& other) {
  for (auto& [stream, at] : other) one[stream] = std::max(one[stream], at);
}

// --- memory ---------------------------------------------------------------------------------------------------

struct Access { // of some bytes, by a stream
  const char *low, *high;
  int64_t stream;
  uint64_t at;
  bool write;
};

struct Block {
  size_t size = 0;
  std::vector<Access> accesses; // the newest of each stream, for each part of it that was used
  std::vector<int64_t> kept_for; // streams that have to be through before it is used again
};

char *shown = nullptr, *real_ = nullptr;
size_t used = UNIT;
std::map<char*, Block> blocks; // of the device, by shown address
std::map<char*, size_t> pinned;
std::map<size_t, std::vector<char*>> spare;

char* real(void* p) { return real_ + (static_cast<char*>(p) - shown); }

Block* block_of(const void* p) {
  auto* at = static_cast<char*>(const_cast<void*>(p));
  auto it = blocks.upper_bound(at);
  if (it == blocks.begin()) return nullptr;
  --it;
  return at < it->first + it->second.size ? &it->second : nullptr;
}

bool is_pinned(const void* p) {
  auto* at = static_cast<char*>(const_cast<void*>(p));
  auto it = pinned.upper_bound(at);
  if (it == pinned.begin()) return false;
  --it;
  return at < it->first + it->second;
}

// --- streams --------------------------------------------------------------------------------------------------

struct Task {
  std::function<void()> work;
  int64_t stream = -1; // or: wait for this many of that stream
  uint64_t count = 0;
};

struct Lane {
  std::deque<Task> queue;
  uint64_t issued = 0, done = 0;
  Clock clock;
};

std::map<int64_t, Lane> lanes;
int64_t lanes_made = DEVICES; // the first ones are the default streams of their devices
Clock host;

void run(int64_t stream, uint64_t count) {
  auto& lane = lanes[stream];
  while (lane.done < count && !lane.queue.empty()) {
    Task task = std::move(lane.queue.front());
    lane.queue.pop_front();
    if (task.stream >= 0) run(task.stream, task.count);
    else task.work();
    ++lane.done;
  }
}

void drain(int64_t stream) { run(stream, lanes[stream].issued); }

Lane& issue(int64_t stream) {
  auto& lane = lanes[stream];
  ++lane.issued;
  join(lane.clock, host);
  lane.clock[stream] = lane.issued;
  return lane;
}

void host_waits(int64_t stream, const Clock& until) {
  join(host, until);
  if (in_kernel) return;
  ++waits;
}

void saw(int64_t stream, const at::Tensor& t, bool write) {
  Block* block = block_of(t.data_ptr());
  if (block == nullptr) return;
  Clock& clock = lanes[stream].clock;
  const char* low = static_cast<const char*>(t.data_ptr());
  const char* high = low + at::detail::computeStorageNbytes(t.sizes(), t.strides(), t.itemsize());
  auto& all = block->accesses;
  for (auto& one : all) {
    if (one.high <= low || high <= one.low || one.stream == stream || !(write || one.write)) continue;
    TORCH_CHECK(clock[one.stream] >= one.at, "late: stream ", stream, write ? " writes over what stream " : " uses what stream ",
        one.stream, one.write ? " wrote" : " reads", ", and has not waited for it");
  }
  // What this access covers is seen by whoever has waited for this one.
  all.erase(std::remove_if(all.begin(), all.end(), [&](const Access& one) {
    return low <= one.low && one.high <= high && (write || (one.stream == stream && !one.write));
  }), all.end());
  all.push_back({low, high, stream, clock[stream], write});
}

int64_t live = 0, room = SPAN; // bytes in use, and how many there may be

struct LateAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    Held held;
    if (shown == nullptr) {
      auto map = [](int prot) { return static_cast<char*>(mmap(nullptr, SPAN, prot, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)); };
      shown = map(PROT_NONE);
      real_ = map(PROT_READ | PROT_WRITE);
    }
    Device device(LATE, current);
    if (n == 0) return {nullptr, nullptr, &free, device};
    size_t size = (n + UNIT - 1) / UNIT * UNIT;
    TORCH_CHECK_WITH(OutOfMemoryError, live + static_cast<int64_t>(size) <= room, "late: out of memory");
    live += size;
    auto& left = spare[size];
    char* p;
    if (!left.empty()) {
      p = left.back();
      left.pop_back();
    } else {
      TORCH_CHECK(used + size <= SPAN, "late: out of memory");
      p = shown + used;
      used += size;
    }
    blocks[p] = Block{size};
    return {p, p, &free, device};
  }
  static void free(void* p) {
    if (p == nullptr) return;
    Held held;
    auto it = blocks.find(static_cast<char*>(p));
    size_t size = it->second.size;
    for (auto stream : it->second.kept_for) drain(stream);
    std::memset(real(p), 0xFF, size);
    live -= size;
    blocks.erase(it);
    spare[size].push_back(static_cast<char*>(p));
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* to, const void* from, size_t n) const override {
    Held held;
    std::memcpy(real(to), real(const_cast<void*>(from)), n);
  }
};

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    Held held;
    void* p = n ? aligned_alloc(64, (n + 63) / 64 * 64) : nullptr;
    if (n) {
      std::memset(p, 0xFF, n);
      pinned[static_cast<char*>(p)] = n;
    }
    return {p, p, &release, Device(DeviceType::CPU)};
  }
  static void release(void* p) {
    Held held;
    pinned.erase(static_cast<char*>(p));
    ::free(p);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
};

LateAllocator allocator;
PinnedAllocator pinned_allocator;

// --- devices, streams and events for torch ---------------------------------------------------------------------

struct Event {
  int64_t stream = -1;
  uint64_t count = 0;
  Clock clock;
  double at_ms = 0;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return LATE; }
  Device exchangeDevice(Device d) const override {
    Device before(LATE, current);
    setDevice(d);
    return before;
  }
  Device getDevice() const override { return {LATE, current}; }
  void setDevice(Device d) const override { if (d.index() >= 0) current = d.index(); }
  void uncheckedSetDevice(Device d) const noexcept override { if (d.index() >= 0) current = d.index(); }
  static c10::Stream stream(DeviceIndex i, int64_t id) { return c10::Stream(c10::Stream::UNSAFE, Device(LATE, i), id); }
  static DeviceIndex index(Device d) { return d.index() < 0 ? current : d.index(); }
  static int64_t number(const c10::Stream& s) { return s.id() == 0 ? s.device_index() : s.id(); }
  c10::Stream getStream(Device d) const override { return stream(index(d), currents[index(d)]); }
  c10::Stream getDefaultStream(Device d) const override { return stream(index(d), 0); }
  c10::Stream getNewStream(Device d, int) const override {
    Held held;
    return stream(index(d), lanes_made++);
  }
  c10::Stream getStreamFromGlobalPool(Device d, bool) const override { return getNewStream(d, 0); }
  c10::Stream exchangeStream(c10::Stream s) const override {
    auto before = getStream(s.device());
    currents[s.device_index()] = s.id();
    return before;
  }
  void destroyEvent(void* e, const DeviceIndex) const noexcept override { delete static_cast<Event*>(e); }
  void record(void** e, const c10::Stream& s, const DeviceIndex, const c10::EventFlag) const override {
    Held held;
    if (*e == nullptr) *e = new Event();
    auto* event = static_cast<Event*>(*e);
    auto& lane = lanes[number(s)];
    join(lane.clock, host);
    auto now = std::chrono::steady_clock::now().time_since_epoch();
    *event = Event{number(s), lane.issued, lane.clock, std::chrono::duration<double, std::milli>(now).count()};
  }
  void block(void* e, const c10::Stream& s) const override {
    Held held;
    auto* event = static_cast<Event*>(e);
    if (event == nullptr || event->stream < 0) return;
    auto& lane = issue(number(s));
    join(lane.clock, event->clock);
    lane.queue.push_back(Task{nullptr, event->stream, event->count});
  }
  bool queryEvent(void* e) const override {
    Held held;
    auto* event = static_cast<Event*>(e);
    return event == nullptr || event->stream < 0 || lanes[event->stream].done >= event->count;
  }
  DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  bool queryStream(const c10::Stream& s) const override {
    Held held;
    return lanes[number(s)].queue.empty();
  }
  void synchronizeStream(const c10::Stream& s) const override {
    Held held;
    drain(number(s));
    host_waits(number(s), lanes[number(s)].clock);
  }
  void synchronizeEvent(void* e) const override {
    Held held;
    auto* event = static_cast<Event*>(e);
    if (event == nullptr || event->stream < 0) return;
    run(event->stream, event->count);
    host_waits(event->stream, event->clock);
  }
  void synchronizeDevice(const DeviceIndex) const override {
    Held held;
    for (auto& [id, lane] : lanes) {
      drain(id);
      host_waits(id, lane.clock);
    }
  }
  double elapsedTime(void* a, void* b, const DeviceIndex) const override {
    return static_cast<Event*>(b)->at_ms - static_cast<Event*>(a)->at_ms;
  }
  void recordDataPtrOnStream(const c10::DataPtr& p, const c10::Stream& s) const override {
    Held held;
    if (auto* block = block_of(p.get())) block->kept_for.push_back(number(s));
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

int64_t here() { return Guard::number(Guard::stream(current, currents[current])); }

struct LateGenerator final : c10::GeneratorImpl {
  explicit LateGenerator(DeviceIndex i, at::Generator inner = at::detail::createCPUGenerator())
      : GeneratorImpl(Device(LATE, i), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), cpu(std::move(inner)) {}
  static uint64_t other(uint64_t seed) { return seed ^ 0x5DEECE66DULL; } // not the CPU's numbers for the same seed
  void set_current_seed(uint64_t s) override { cpu.set_current_seed(other(s)); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "late: no offsets"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "late: no offsets"); }
  uint64_t current_seed() const override { return other(cpu.current_seed()); }
  uint64_t seed() override { return cpu.seed(); }
  void set_state(const c10::TensorImpl& s) override {
    auto tensor = at::Tensor(c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(const_cast<c10::TensorImpl*>(&s)));
    cpu.set_state(tensor);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return cpu.get_state().getIntrusivePtr(); }
  LateGenerator* clone_impl() const override { return new LateGenerator(device_.index(), cpu.clone()); }
  at::Generator cpu;
};

at::Generator& default_generator(DeviceIndex i) {
  static std::array<at::Generator, DEVICES> all = {at::make_generator<LateGenerator>(0), at::make_generator<LateGenerator>(1)};
  return all[i < 0 ? current : i];
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return DEVICES; }
  void setCurrentDevice(DeviceIndex i) const override { current = i; }
  DeviceIndex getCurrentDevice() const override { return current; }
  DeviceIndex exchangeDevice(DeviceIndex i) const override { auto was = current; current = i; return was; }
  DeviceIndex maybeExchangeDevice(DeviceIndex i) const override { return exchangeDevice(i); }
  const at::Generator& getDefaultGenerator(DeviceIndex i) const override { return default_generator(i); }
  at::Generator getNewGenerator(DeviceIndex i) const override { return at::make_generator<LateGenerator>(i < 0 ? current : i); }
  bool isPinnedPtr(const void* p) const override { Held held; return is_pinned(p); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  Device getDeviceFromPtr(void*) const override { return {LATE, current}; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t n) const override {
    auto fresh = allocator.allocate(n);
    Held held;
    if (storage.nbytes() && n) std::memcpy(real(fresh.get()), real(storage.mutable_data()), std::min(n, storage.nbytes()));
    auto* impl = storage.unsafeGetStorageImpl();
    impl->set_data_ptr_noswap(std::move(fresh));
    impl->set_nbytes(n);
  }
};

// --- operators --------------------------------------------------------------------------------------------------

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(size, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(size, stride, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

// The same tensor, as the CPU can see it.
at::Tensor seen(const at::Tensor& t) {
  if (t.is_cpu() || t.numel() == 0) return t.is_cpu() ? t : at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kCPU));
  return at::from_blob(real(t.data_ptr()), t.sizes(), t.strides(), t.options().device(at::kCPU));
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst, bool non_blocking) {
  if (self.numel() == 0) return dst;
  Held held;
  auto device = self.is_cpu() ? dst.device() : self.device();
  c10::DeviceGuard guard(device);
  auto stream = here();
  auto& lane = issue(stream);
  if (!self.is_cpu()) saw(stream, self, false);
  if (!dst.is_cpu()) saw(stream, dst, true);
  const at::Tensor& on_host = self.is_cpu() ? self : dst;
  bool plain = self.dtype() == dst.dtype() && self.is_contiguous() && dst.is_contiguous() && self.sizes() == dst.sizes();
  bool across = self.is_cpu() != dst.is_cpu();
  if (!in_kernel && non_blocking && across && plain && is_pinned(on_host.data_ptr())) {
    auto kept = on_host.storage(); // as torch's own allocator of pinned memory keeps it
    char* to = dst.is_cpu() ? static_cast<char*>(dst.data_ptr()) : real(dst.data_ptr());
    char* from = self.is_cpu() ? static_cast<char*>(self.data_ptr()) : real(self.data_ptr());
    auto n = self.nbytes();
    lane.queue.push_back(Task{[kept, to, from, n] { std::memcpy(to, from, n); }});
    return dst;
  }
  lane.queue.push_back(Task{[] {}});
  drain(stream);
  if (across && !in_kernel && !(non_blocking && self.is_cpu())) host_waits(stream, lane.clock);
  auto to = seen(dst);
  to.copy_(seen(self));
  return dst;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& dst) {
  if (dst.sizes() != self.sizes()) const_cast<at::Tensor&>(dst).resize_(self.sizes());
  return copy_from(self, dst, false);
}

at::Scalar scalar(const at::Tensor& self) { return at::_local_scalar_dense(self.cpu()); }

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  size_t needed = (self.storage_offset() + self.numel()) * self.itemsize();
  if (needed > self.storage().nbytes()) at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), needed);
  return self;
}

void record_stream(at::Tensor& self, at::Stream s) {
  Held held;
  if (auto* block = block_of(self.storage().data())) block->kept_for.push_back(Guard::number(s));
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Held held;
  bool before = in_kernel;
  in_kernel = true;
  try {
    at::native::cpu_fallback(op, stack);
  } catch (...) {
    in_kernel = before;
    throw;
  }
  in_kernel = before;
  // What the host is told of a value it has waited for.
  for (auto& value : torch::jit::last(*stack, op.schema().returns().size()))
    if (value.isBool() || value.isScalar()) host_waits(here(), lanes[here()].clock);
}

at::Generator cpu_of(const std::optional<at::Generator>& given, DeviceIndex i) {
  auto generator = given.has_value() && given->defined() ? *given : default_generator(i);
  return dynamic_cast<LateGenerator*>(generator.unsafeGetGeneratorImpl())->cpu;
}

template <typename F>
at::Tensor& drawn(at::Tensor& self, const std::optional<at::Generator>& g, F draw) {
  auto made = at::empty(self.sizes(), self.options().device(at::kCPU));
  draw(made, cpu_of(g, self.device().index()));
  bool before = in_kernel;
  in_kernel = true;
  self.copy_(made);
  in_kernel = before;
  return self;
}

at::Tensor& normal_(at::Tensor& self, double mean, double std, std::optional<at::Generator> g) {
  return drawn(self, g, [&](at::Tensor& t, at::Generator c) { t.normal_(mean, std, c); });
}
at::Tensor& uniform_(at::Tensor& self, double a, double b, std::optional<at::Generator> g) {
  return drawn(self, g, [&](at::Tensor& t, at::Generator c) { t.uniform_(a, b, c); });
}
at::Tensor& bernoulli_(at::Tensor& self, double p, std::optional<at::Generator> g) {
  return drawn(self, g, [&](at::Tensor& t, at::Generator c) { t.bernoulli_(p, c); });
}
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& x, double p, std::optional<bool> train) {
  if (!train.value_or(true)) return {x.clone(), at::ones_like(x, x.options().dtype(at::kBool))};
  auto mask = at::empty_like(x).bernoulli_(1 - p);
  return {x * mask * (1 / (1 - p)), mask.to(at::kBool)};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &scalar);
  m.impl("resize_", &resize);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  m.impl("set_.source_Storage", at::native::set_);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("set_", at::native::set_cpu_);
  m.impl("record_stream", &record_stream);
  m.impl("normal_", &normal_);
  m.impl("uniform_", &uniform_);
  m.impl("bernoulli_.float", &bernoulli_);
  m.impl("native_dropout", &native_dropout);
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mse_loss, fp32)
  KERNEL_PRIVATEUSEONE(cross_entropy_loss, fp32)
}

int64_t waited() { return waits.load(); }
void fill() {
  Held held;
  room = live;
}
at::Tensor get_state(int64_t i) { return default_generator(static_cast<DeviceIndex>(i)).get_state(); }
void set_state(const at::Tensor& state, int64_t i) { default_generator(static_cast<DeviceIndex>(i)).set_state(state); }
void seed(int64_t number, int64_t i) { default_generator(static_cast<DeviceIndex>(i)).set_current_seed(static_cast<uint64_t>(number)); }

TORCH_LIBRARY(late, m) {
  m.def("waited() -> int", &waited);
  m.def("fill() -> ()", &fill);
  m.def("get_state(int device) -> Tensor", &get_state);
  m.def("set_state(Tensor state, int device) -> ()", &set_state);
  m.def("seed(int number, int device) -> ()", &seed);
}

struct Registered {
  Registered() {
    c10::SetAllocator(LATE, &allocator);
    at::RegisterPrivateUse1HooksInterface(new Hooks());
  }
} registered;

} // namespace
