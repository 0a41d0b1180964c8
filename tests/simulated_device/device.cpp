// An accelerator that is simulated on the CPU, for tests of code that uses streams: see docs/simulated_device.md.
//
// - Device memory is mapped twice. Tensors have the address of the mapping without access rights, so host code that
//   takes data_ptr() for host memory dies with SIGSEGV; the streams' threads work on the other one.
// - A stream is a queue with a thread. Tests pause and resume it, or let all be lazy: then each runs what somebody
//   waits for, and no more. So nothing depends on the clock.
// - Copies, fills and operators that only change their arguments (what optimizers do) are queued. All others wait for
//   the current stream and are computed on the CPU at once: later than on a real device at worst, never in another order.
// - A non-blocking copy is queued only if the host memory is pinned; otherwise it blocks, as CUDA's does.
// - Freed device memory is overwritten in the order of its stream, and used again, as by an allocator that caches.
// - Pinning can fail, and host memory that is unpinned while a stream uses it is a violation that tests can read.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

constexpr int kDevices = 2;
constexpr size_t kAddressSpace = 8ull << 30;  // of each device; pages come when they are used
constexpr size_t kRounding = 512;             // bytes: sizes of allocations are multiples
constexpr auto kType = c10::DeviceType::PrivateUse1;

// What CUDA answers to cudaHostRegister and cudaHostUnregister.
constexpr int kOutOfMemory = 2, kAlreadyRegistered = 712, kNotRegistered = 713;

using Work = std::function<void()>;
using Lock = std::lock_guard<std::mutex>;

// ---- streams and events ---------------------------------------------------------------------------------------------

class Stream;

// A place in a stream. Who waits for it lets a lazy stream run so far, and no further.
class Event {
 public:
  Event(Stream& stream, int64_t number) : stream_(stream), number_(number) {}
  void finish() {
    { Lock lock(mutex_); done_ = true; }
    changed_.notify_all();
  }
  void wait();
  bool is_done();

 private:
  Stream& stream_;
  const int64_t number_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
};
using EventPtr = std::shared_ptr<Event>;

std::atomic<int64_t> work_queued{0}, host_waits{0};
enum Laziness { kNone, kAll, kSideStreams };
std::atomic<int64_t> laziness{kNone};

// Lives for ever, like its thread: nothing has to end in any order when the process does.
class Stream {
 public:
  explicit Stream(bool is_side) : is_side_(is_side) { std::thread([this] { run(); }).detach(); }

  void add(Work work) {
    work_queued++;
    Lock lock(mutex_);
    push(std::move(work));
  }
  EventPtr record() {
    Lock lock(mutex_);
    auto event = std::make_shared<Event>(*this, queued_);
    push([this, event] {
      { Lock idle(mutex_); busy_ = false; }  // who has waited for this finds the stream idle
      event->finish();
    });
    return event;
  }
  void wait_for(EventPtr event) {
    Lock lock(mutex_);
    push([event] { event->wait(); });
  }
  // Returns when all that is queued is done; raises what it has raised.
  void synchronize() {
    host_waits++;
    record()->wait();
    Lock lock(mutex_);
    auto failure = std::exchange(failure_, {});
    TORCH_CHECK(failure.empty(), "simulated device: ", failure);
  }
  void pause(bool value) {
    { Lock lock(mutex_); paused_ = value; }
    changed_.notify_all();
  }
  void want(int64_t number) {
    { Lock lock(mutex_); wanted_ = std::max(wanted_, number); }
    changed_.notify_all();
  }
  void wake() {
    { Lock lock(mutex_); }
    changed_.notify_all();
  }
  bool is_idle() {
    Lock lock(mutex_);
    wanted_ = queued_;  // who polls waits
    changed_.notify_all();
    return queue_.empty() && !busy_;
  }

 private:
  void push(Work work) {  // with the mutex
    queue_.push_back(std::move(work));
    queued_++;
    changed_.notify_all();
  }
  bool is_lazy() const { return laziness == kAll || (laziness == kSideStreams && is_side_); }
  bool may_run() const { return !queue_.empty() && !paused_ && (!is_lazy() || begun_ <= wanted_); }
  void run() {
    at::AutoDispatchBelowADInplaceOrView no_autograd;
    while (true) {
      Work work;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        busy_ = false;
        changed_.wait(lock, [this] { return may_run(); });
        work = std::move(queue_.front());
        queue_.pop_front();
        begun_++;
        busy_ = true;
      }
      try {
        work();
      } catch (const std::exception& error) {  // as on a real device, who waits next is told
        Lock lock(mutex_);
        if (failure_.empty()) failure_ = error.what();
      }
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Work> queue_;
  int64_t queued_ = 0, begun_ = 0, wanted_ = -1;
  const bool is_side_;
  bool paused_ = false, busy_ = false;
  std::string failure_;
};

void Event::wait() {
  stream_.want(number_);
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return done_; });
}
bool Event::is_done() {
  stream_.want(number_);
  Lock lock(mutex_);
  return done_;
}

// ---- what the process has -------------------------------------------------------------------------------------------

struct Process {
  std::mutex mutex;
  bool started = false, refuses_streams = false;
  pid_t owner = 0;
  std::array<std::vector<Stream*>, kDevices> streams;
  std::vector<std::string> violations;

  // Pinned host memory, and what of the host's memory queued work will still use.
  std::map<char*, size_t> pinned;
  std::map<int64_t, std::pair<char*, size_t>> in_flight;
  int64_t flights = 0, pins_left = -1;  // -1: any number
};
Process& process() {
  static auto* the = new Process;
  return *the;
}

thread_local int current_device = 0;
thread_local std::array<c10::StreamId, kDevices> current_streams{};

void start() {
  auto& p = process();
  Lock lock(p.mutex);
  TORCH_CHECK(!p.started || p.owner == getpid(), "Cannot re-initialize the simulated device in a forked subprocess");
  if (p.started) return;
  p.started = true;
  p.owner = getpid();
  for (auto& streams : p.streams) streams.push_back(new Stream(false));
}

Stream& stream_at(int device, c10::StreamId id) {
  start();
  Lock lock(process().mutex);
  return *process().streams.at(device).at(id);
}
Stream& stream_at(const c10::Stream& s) { return stream_at(s.device_index(), s.id()); }
Stream& current_stream(int device) { return stream_at(device, current_streams.at(device)); }

// ---- device memory --------------------------------------------------------------------------------------------------

struct Block {
  int device;
  char* shown;
  size_t size;
  c10::StreamId stream;
  std::set<c10::StreamId> others;  // by record_stream
};

struct Memory {
  char *shown, *real;
  size_t used = 0;
  std::atomic<int64_t> live{0}, limit{-1};
  std::map<std::pair<size_t, c10::StreamId>, std::vector<char*>> idle;
  std::mutex mutex;

  Memory() : shown(reserve(PROT_NONE)), real(reserve(PROT_READ | PROT_WRITE)) {}
  static char* reserve(int access) {
    void* at = mmap(nullptr, kAddressSpace, access, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(at != MAP_FAILED, "no address space for the simulated device");
    return static_cast<char*>(at);
  }
  bool has(const void* p) const { return p >= shown && p < shown + kAddressSpace; }
};
Memory& memory_of(int device) {
  static auto* all = new std::array<Memory, kDevices>;
  return all->at(device);
}
char* real_address(const void* shown, int device) {
  auto& memory = memory_of(device);
  return memory.real + (static_cast<const char*>(shown) - memory.shown);
}

void free_block(void* context) {
  std::unique_ptr<Block> block(static_cast<Block*>(context));
  if (!block || process().owner != getpid()) return;
  auto& stream = stream_at(block->device, block->stream);
  for (auto id : block->others) stream.wait_for(stream_at(block->device, id).record());
  auto* real = real_address(block->shown, block->device);
  stream.add([real, size = block->size] { std::memset(real, 0xDB, size); });
  auto& memory = memory_of(block->device);
  Lock lock(memory.mutex);
  memory.idle[{block->size, block->stream}].push_back(block->shown);
  memory.live -= block->size;
}

struct DeviceAllocator final : at::Allocator {
  at::DataPtr allocate(size_t nbytes) override {
    at::globalContext().lazyInitDevice(kType);
    const int device = current_device;
    const c10::Device where(kType, static_cast<c10::DeviceIndex>(device));
    if (!nbytes) return {nullptr, nullptr, &free_block, where};
    const size_t size = (nbytes + kRounding - 1) / kRounding * kRounding;
    auto& memory = memory_of(device);
    Lock lock(memory.mutex);
    TORCH_CHECK_WITH(OutOfMemoryError, memory.limit < 0 || memory.live + static_cast<int64_t>(size) <= memory.limit,
        "the simulated device is out of memory");
    auto block = std::make_unique<Block>(Block{device, nullptr, size, current_streams[device], {}});
    auto& idle = memory.idle[{size, block->stream}];
    if (!idle.empty()) {
      block->shown = idle.back();
      idle.pop_back();
    } else {
      TORCH_CHECK_WITH(OutOfMemoryError, memory.used + size <= kAddressSpace, "the simulated device is full");
      block->shown = memory.shown + memory.used;
      memory.used += size;
    }
    memory.live += size;
    auto* shown = block->shown;
    return {shown, block.release(), &free_block, where};
  }
  at::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t count) const override {
    auto *a = real_address(to, current_device), *b = real_address(from, current_device);
    current_stream(current_device).add([=] { std::memcpy(a, b, count); });
  }
};
DeviceAllocator device_allocator;
REGISTER_ALLOCATOR(kType, &device_allocator)

// ---- pinned host memory ---------------------------------------------------------------------------------------------

bool is_pinned(const void* p) {
  Lock lock(process().mutex);
  auto& pinned = process().pinned;
  auto* at = static_cast<char*>(const_cast<void*>(p));
  auto after = pinned.upper_bound(at);
  return after != pinned.begin() && at < std::prev(after)->first + std::prev(after)->second;
}

// All with the process's mutex.
bool is_in_flight(char* begin, size_t size) {
  for (auto& [_, range] : process().in_flight)
    if (range.first < begin + size && begin < range.first + range.second) return true;
  return false;
}
bool may_pin() {
  auto& left = process().pins_left;
  if (left == 0) return false;
  if (left > 0) left--;
  return true;
}

int64_t host_register(int64_t address, int64_t size) {
  start();
  Lock lock(process().mutex);
  auto& pinned = process().pinned;
  auto* begin = reinterpret_cast<char*>(address);
  auto after = pinned.lower_bound(begin + size);
  if (after != pinned.begin() && std::prev(after)->first + std::prev(after)->second > begin) return kAlreadyRegistered;
  if (!may_pin()) return kOutOfMemory;
  pinned[begin] = size;
  return 0;
}
int64_t host_unregister(int64_t address) {
  start();
  Lock lock(process().mutex);
  auto& pinned = process().pinned;
  auto found = pinned.find(reinterpret_cast<char*>(address));
  if (found == pinned.end()) return kNotRegistered;
  if (is_in_flight(found->first, found->second))
    process().violations.push_back("host memory was unregistered while a stream uses it");
  pinned.erase(found);
  return 0;
}

struct PinnedAllocator final : at::HostAllocator {
  static void free_pinned(void* p) {
    if (!p) return;
    Lock lock(process().mutex);
    auto* begin = static_cast<char*>(p);
    const bool late = is_in_flight(begin, process().pinned[begin]);
    process().pinned.erase(begin);
    if (!late) std::free(p);  // otherwise a real one keeps it until the stream is done; this one for ever
  }
  at::DataPtr allocate(size_t nbytes) override {
    start();
    void* p = nullptr;
    if (nbytes) {
      Lock lock(process().mutex);
      TORCH_CHECK(may_pin() && !posix_memalign(&p, 4096, nbytes), "cannot pin ", nbytes, " bytes");
      process().pinned[static_cast<char*>(p)] = nbytes;
    }
    return {p, p, &free_pinned, at::Device(at::kCPU)};
  }
  at::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t count) const override { std::memcpy(to, from, count); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
PinnedAllocator pinned_allocator;

// ---- what torch asks of a device ------------------------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr auto static_type = kType;
  Guard() = default;
  explicit Guard(c10::DeviceType) {}

  c10::DeviceType type() const override { return kType; }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  c10::Device getDevice() const override { return {kType, static_cast<c10::DeviceIndex>(current_device)}; }
  void uncheckedSetDevice(c10::Device d) const noexcept override { current_device = d.index(); }
  void setDevice(c10::Device d) const override {
    TORCH_CHECK(d.index() >= 0 && d.index() < kDevices, "there is no simulated device ", d.index());
    current_device = d.index();
  }
  c10::Device exchangeDevice(c10::Device d) const override {
    auto before = getDevice();
    setDevice(d);
    return before;
  }

  static int index_of(c10::Device d) { return d.has_index() ? d.index() : current_device; }
  static c10::Stream stream(int device, c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, {kType, static_cast<c10::DeviceIndex>(device)}, id);
  }
  c10::Stream getStream(c10::Device d) const override { return stream(index_of(d), current_streams[index_of(d)]); }
  c10::Stream getDefaultStream(c10::Device d) const override { return stream(index_of(d), 0); }
  c10::Stream getNewStream(c10::Device d, int = 0) const override {
    start();
    Lock lock(process().mutex);
    TORCH_CHECK(!process().refuses_streams, "this device has no streams to create");
    auto& streams = process().streams.at(index_of(d));
    streams.push_back(new Stream(true));
    return stream(index_of(d), static_cast<c10::StreamId>(streams.size()) - 1);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return getNewStream(d); }
  c10::Stream exchangeStream(c10::Stream s) const override {
    auto before = getStream(s.device());
    current_streams[s.device_index()] = s.id();
    return before;
  }
  bool queryStream(const c10::Stream& s) const override { return stream_at(s).is_idle(); }
  void synchronizeStream(const c10::Stream& s) const override { stream_at(s).synchronize(); }
  void synchronizeDevice(c10::DeviceIndex d) const override {
    start();
    std::vector<Stream*> all;
    {
      Lock lock(process().mutex);
      all = process().streams.at(d < 0 ? current_device : d);
    }
    for (auto* one : all) one->synchronize();
  }

  static Event& event_in(void* event) { return **static_cast<EventPtr*>(event); }
  void record(void** event, const c10::Stream& s, c10::DeviceIndex, c10::EventFlag) const override {
    auto recorded = stream_at(s).record();
    if (*event) *static_cast<EventPtr*>(*event) = recorded;
    else *event = new EventPtr(recorded);
  }
  void block(void* event, const c10::Stream& s) const override {
    if (event) stream_at(s).wait_for(*static_cast<EventPtr*>(event));
  }
  bool queryEvent(void* event) const override { return !event || event_in(event).is_done(); }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    host_waits++;
    event_in(event).wait();
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<EventPtr*>(event); }
  double elapsedTime(void*, void*, c10::DeviceIndex) const override { return 1.0; }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& s) const override {
    auto* block = static_cast<Block*>(data.get_context());
    if (block && block->stream != s.id()) block->others.insert(s.id());
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Generator final : c10::GeneratorImpl {
  at::Generator inner = at::make_generator<at::CPUGeneratorImpl>();

  explicit Generator(c10::DeviceIndex device)
      : c10::GeneratorImpl(c10::Device(kType, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.unsafeGetGeneratorImpl()->seed(); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.device().is_cpu(), "RNG state must be a torch.ByteTensor of the host");  // as CUDA does
    inner.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.unsafeGetGeneratorImpl()->get_state(); }
  GeneratorImpl* clone_impl() const override {
    auto* copy = new Generator(device().index());
    copy->inner = inner.clone();
    return copy;
  }
};
at::Generator& default_generator(int64_t device) {
  static auto* all =
      new std::array<at::Generator, kDevices>{at::make_generator<Generator>(0), at::make_generator<Generator>(1)};
  return all->at(device < 0 ? current_device : device);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  void init() const override { start(); }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return process().started; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(c10::DeviceIndex d) const override { Guard().setDevice({kType, d}); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex d) const override { return Guard().exchangeDevice({kType, d}).index(); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex d) const override {
    return d < 0 || d >= kDevices ? static_cast<c10::DeviceIndex>(current_device) : exchangeDevice(d);
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  bool isPinnedPtr(const void* p) const override { return is_pinned(p); }
  at::Device getDeviceFromPtr(void* p) const override {
    for (int device = 0; device < kDevices; device++)
      if (memory_of(device).has(p)) return {kType, static_cast<c10::DeviceIndex>(device)};
    TORCH_CHECK(false, "this is not memory of a simulated device");
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex d) const override { return default_generator(d); }
  at::Generator getNewGenerator(c10::DeviceIndex d) const override {
    return at::make_generator<Generator>(d < 0 ? static_cast<c10::DeviceIndex>(current_device) : d);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    c10::DeviceGuard guard(storage.device());
    auto data = device_allocator.allocate(size);
    const auto count = std::min(size, impl->nbytes());
    if (count) device_allocator.copy_data(data.get(), impl->data(), count);
    impl->set_data_ptr(std::move(data));
    impl->set_nbytes(size);
  }
};

// ---- operators ------------------------------------------------------------------------------------------------------

bool is_ours(const at::Tensor& t) { return t.defined() && t.device().type() == kType; }

// The elements as the streams' threads see them. They own nothing: who frees memory too early is to be found out.
at::Tensor real_view(const at::Tensor& t) {
  auto options = t.options().device(at::kCPU).pinned_memory(false);
  if (!t.numel()) return at::empty_strided(t.sizes(), t.strides(), options);
  return at::from_blob(real_address(t.data_ptr(), t.device().index()), t.sizes(), t.strides(), options);
}
at::Tensor host_view(const at::Tensor& t) {
  return at::from_blob(t.data_ptr(), t.sizes(), t.strides(), t.options().pinned_memory(false));
}

using Sizes = c10::IntArrayRef;
using SymSizes = c10::SymIntArrayRef;
template <typename T>
using Optional = std::optional<T>;

at::Tensor empty_memory_format(Sizes size, Optional<c10::ScalarType> dtype, Optional<c10::Layout>,
    Optional<c10::Device> device, Optional<bool>, Optional<c10::MemoryFormat> format) {
  c10::DeviceGuard guard(c10::device_or_default(device));
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, &device_allocator, keys, c10::dtype_or_default(dtype), format);
}
at::Tensor empty_strided(Sizes size, Sizes stride, Optional<c10::ScalarType> dtype, Optional<c10::Layout>,
    Optional<c10::Device> device, Optional<bool>) {
  c10::DeviceGuard guard(c10::device_or_default(device));
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, &device_allocator, keys, c10::dtype_or_default(dtype));
}
at::Tensor as_strided(const at::Tensor& self, SymSizes size, SymSizes stride, Optional<c10::SymInt> offset) {
  return at::cpu::as_strided_symint(self, size, stride, offset);
}
const at::Tensor& resize_(const at::Tensor& self, SymSizes size, Optional<c10::MemoryFormat> format) {
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}
at::Tensor reshape_alias(const at::Tensor& self, SymSizes size, SymSizes stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
at::Tensor view(const at::Tensor& self, SymSizes size) { return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size)); }
at::Tensor& set_to_tensor(at::Tensor& self, const at::Tensor& source) { return at::native::set_tensor_(self, source); }
at::Tensor& set_to_storage(at::Tensor& self, at::Storage source) { return at::native::set_(self, source); }
at::Tensor& set_in_storage(at::Tensor& self, at::Storage source, int64_t offset, Sizes size, Sizes stride) {
  return at::cpu::set_(self, source, offset, size, stride);
}

// Queues what uses pinned host memory.
void add_flight(Stream& stream, const at::Tensor& host, Work work) {
  auto& p = process();
  int64_t number;
  {
    Lock lock(p.mutex);
    number = p.flights++;
    auto* begin = static_cast<char*>(host.data_ptr());
    int64_t last = 0;
    for (int64_t d = 0; d < host.dim(); d++) last += (host.size(d) - 1) * host.stride(d);
    p.in_flight[number] = {begin, (last + 1) * host.element_size()};
  }
  stream.add([work = std::move(work), number] {
    work();
    Lock lock(process().mutex);
    process().in_flight.erase(number);
  });
}

Work copying(at::Tensor to, at::Tensor from) {
  return [to, from]() mutable { to.copy_(from); };
}

at::Tensor copy_from(const at::Tensor& given, const at::Tensor& dst, bool non_blocking) {
  if (!given.numel()) return dst;
  at::Tensor self = given;
  if (is_ours(given) && is_ours(dst)) {
    const int from = self.device().index(), to = dst.device().index();
    auto& stream = current_stream(from);
    if (from != to) stream.wait_for(current_stream(to).record());
    stream.add(copying(real_view(dst), real_view(self)));
    if (from != to) current_stream(to).wait_for(stream.record());
  } else if (is_ours(given)) {
    c10::DeviceGuard guard(given.device());
    auto& stream = current_stream(given.device().index());
    // As CUDA does it: what does not lie as the target does is brought into order on the device first.
    if (!given.is_contiguous() || given.scalar_type() != dst.scalar_type()) {
      self = at::empty_strided(dst.sizes(), dst.strides(), dst.options().device(given.device()).pinned_memory(false));
      stream.add(copying(real_view(self), real_view(given.expand(dst.sizes()))));
    }
    if (non_blocking && is_pinned(dst.data_ptr())) {
      add_flight(stream, dst, copying(host_view(dst), real_view(self)));
    } else {
      stream.add(copying(host_view(dst), real_view(self)));
      stream.synchronize();
    }
  } else {
    auto& stream = current_stream(dst.device().index());
    if (non_blocking && is_pinned(self.data_ptr())) {
      add_flight(stream, self, copying(real_view(dst), host_view(self)));
    } else if (non_blocking) {
      stream.add(copying(real_view(dst), self.clone()));
    } else {
      stream.add(copying(real_view(dst), host_view(self)));
      stream.synchronize();
    }
  }
  // As CUDA does it: on the host at once, whether or not the bytes have come.
  const bool conj = given.is_conj() != dst.is_conj(), neg = given.is_neg() != dst.is_neg();
  if (conj || neg) {
    auto change = [conj, neg, to = is_ours(dst) ? real_view(dst) : host_view(dst)]() mutable {
      if (conj) to.conj_physical_();
      if (neg) to.neg_();
    };
    if (is_ours(dst)) current_stream(dst.device().index()).add(change);
    else change();
  }
  return dst;
}
at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& dst) {
  at::native::resize_(dst, self.sizes(), std::nullopt);
  return copy_from(self, dst, false);
}
at::Scalar local_scalar(const at::Tensor& self) {
  current_stream(self.device().index()).synchronize();
  return real_view(self).item();
}
// A reduction that is queued, for what is computed beside the training.
at::Tensor& sum_out(const at::Tensor& self, c10::OptionalArrayRef<int64_t> dim, bool keepdim,
    Optional<c10::ScalarType> dtype, at::Tensor& out) {
  current_stream(self.device().index()).add([to = real_view(out), from = real_view(self), keepdim, dtype,
      dims = dim.has_value() ? Optional<std::vector<int64_t>>(dim->vec()) : std::nullopt]() mutable {
    at::OptionalIntArrayRef over;
    if (dims.has_value()) over = *dims;
    at::sum_out(to, from, over, keepdim, dtype);
  });
  return out;
}
at::Tensor cat(const at::ITensorListRef& tensors, int64_t dim) {
  std::vector<at::Tensor> from;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.dim() != 1 || tensor.device() != tensors.front().device() ||
        tensor.scalar_type() != tensors.front().scalar_type()) {
      std::vector<at::Tensor> on_host;
      for (const at::Tensor& one : tensors) on_host.push_back(one.cpu());
      return at::cat(on_host, dim).to(tensors.front().device());
    }
    from.push_back(real_view(tensor));
  }
  int64_t size = 0;
  for (const auto& tensor : from) size += tensor.numel();
  auto result = at::empty({size}, tensors.front().options());
  current_stream(result.device().index()).add([to = real_view(result), from]() mutable { at::cat_out(to, from); });
  return result;
}
void record_stream(at::Tensor& self, c10::Stream stream) {
  Guard().recordDataPtrOnStream(self.storage().data_ptr(), stream);
}
// The CPU's own would draw from the CPU's generator.
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, Optional<bool> train) {
  if (train.has_value() && !*train) return {input, at::ones_like(input, at::kBool)};
  auto mask = at::empty_like(input).bernoulli_(1 - p);
  return {p < 1 ? input.mul(mask).div(1 - p) : at::zeros_like(input), mask.to(at::kBool)};
}
// The CPU's own changes the statistics, which its schema does not say. They are not counted as changed, as on CUDA.
std::tuple<at::Tensor, at::Tensor, at::Tensor> native_batch_norm(const at::Tensor& input,
    const Optional<at::Tensor>& weight, const Optional<at::Tensor>& bias, const Optional<at::Tensor>& mean,
    const Optional<at::Tensor>& variance, bool training, double momentum, double epsilon) {
  auto copy = [](const Optional<at::Tensor>& t) {
    return t.has_value() && t->defined() ? Optional<at::Tensor>(t->cpu()) : std::nullopt;
  };
  auto real = [](const Optional<at::Tensor>& t) {
    return t.has_value() && t->defined() ? Optional<at::Tensor>(real_view(*t)) : std::nullopt;
  };
  auto on_host = input.cpu();  // waits for what is queued
  auto [result, saved_mean, saved_scale] = at::native_batch_norm(
      on_host, copy(weight), copy(bias), real(mean), real(variance), training, momentum, epsilon);
  return {result.to(input.device()), saved_mean.to(input.device()), saved_scale.to(input.device())};
}

bool is_generator(const c10::Argument& argument) { return argument.type()->str().find("Generator") != std::string::npos; }

bool only_writes(const c10::FunctionSchema& schema) {
  bool writes = false;
  for (const auto& argument : schema.arguments()) {
    if (is_generator(argument)) return false;
    writes |= argument.alias_info() && argument.alias_info()->isWrite();
  }
  for (const auto& result : schema.returns())
    if (!result.alias_info() || !result.alias_info()->isWrite()) return false;
  return writes && schema.returns().size() <= 1;
}

// Every other operator: queued if it only changes one of its arguments, computed at once on the CPU if not.
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& declared = schema.arguments();
  const auto begin = stack->size() - declared.size();
  std::set<int> devices;
  bool is_simple = only_writes(schema);
  auto same_as = [&](size_t i) {  // the first argument that is the same tensor
    size_t first = 0;
    while (!(*stack)[begin + first].isTensor() ||
        !(*stack)[begin + first].toTensor().is_same((*stack)[begin + i].toTensor())) first++;
    return first;
  };
  for (size_t i = 0; i < declared.size(); i++) {
    const auto& value = (*stack)[begin + i];
    // torch makes add.out of add_; an output of another size would have to be allocated first.
    if (declared[i].is_out()) is_simple &= value.isTensor() && same_as(i) < i;
    if (value.isTensor() && is_ours(value.toTensor())) devices.insert(value.toTensor().device().index());
    else if (value.isTensor() && value.toTensor().defined()) is_simple &= value.toTensor().dim() == 0;
    else is_simple &= !value.isList();
  }
  if (is_simple && devices.size() == 1) {
    torch::jit::Stack arguments;
    at::Tensor written;
    for (size_t i = 0; i < declared.size(); i++) {
      const auto& value = (*stack)[begin + i];
      if (!value.isTensor() || !value.toTensor().defined()) {
        arguments.push_back(value);
        continue;
      }
      const auto tensor = value.toTensor();
      if (declared[i].alias_info() && declared[i].alias_info()->isWrite()) written = tensor;
      if (same_as(i) < i) arguments.push_back(arguments[same_as(i)]);
      else arguments.emplace_back(is_ours(tensor) ? real_view(tensor) : tensor.detach().clone());
    }
    current_stream(*devices.begin()).add([op, arguments]() mutable { op.callBoxed(&arguments); });
    torch::jit::drop(*stack, declared.size());
    if (!schema.returns().empty()) stack->emplace_back(written);
    return;
  }
  for (size_t i = 0; i < declared.size(); i++) {
    if (!is_generator(declared[i])) continue;
    auto& value = (*stack)[begin + i];
    auto generator = value.isNone() ? default_generator(devices.empty() ? -1 : *devices.begin()) : value.toGenerator();
    if (generator.device().type() == kType) value = static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->inner;
  }
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty_memory_format);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("resize_", resize_);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("view", view);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("set_.source_Tensor", set_to_tensor);
  m.impl("set_.source_Storage", set_to_storage);
  m.impl("set_.source_Storage_storage_offset", set_in_storage);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("cat", cat);
  m.impl("sum.IntList_out", sum_out);
  m.impl("native_dropout", native_dropout);
  m.impl("native_batch_norm", native_batch_norm);
  m.impl("record_stream", record_stream);
}
// The fallbacks of these keys would clone the tensor, for which they would copy it, for which they would clone it.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

// ---- what __init__.py calls -----------------------------------------------------------------------------------------

TORCH_LIBRARY(simulated, m) {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  at::setHostAllocator(kType, &pinned_allocator);
  m.def("start", [] { at::globalContext().lazyInitDevice(kType); });
  m.def("is_started", [] { return process().started; });
  m.def("is_bad_fork", [] { return process().started && process().owner != getpid(); });
  m.def("current_device", []() -> int64_t { return current_device; });
  m.def("set_device", [](int64_t d) { Guard().setDevice({kType, static_cast<c10::DeviceIndex>(d)}); });
  m.def("generator_state", [](int64_t d) { return default_generator(d).get_state(); });
  m.def("set_generator_state", [](int64_t d, const at::Tensor& state) { default_generator(d).set_state(state); });
  m.def("seed", [](int64_t d, int64_t seed) { default_generator(d).set_current_seed(seed); });
  m.def("pause", [](int64_t d, int64_t id, bool value) { stream_at(d, id).pause(value); });
  m.def("set_lazy", [](int64_t which) {
    laziness = which;
    for (auto& streams : process().streams)
      for (auto* stream : streams) stream->wake();
  });
  m.def("stream_count", [](int64_t d) -> int64_t { return process().streams.at(d).size(); });
  m.def("refuse_streams", [](bool value) { process().refuses_streams = value; });
  m.def("host_register", &host_register);
  m.def("host_unregister", &host_unregister);
  m.def("limit_pinning", [](int64_t count) { process().pins_left = count; });
  m.def("limit_memory", [](int64_t d, int64_t nbytes) { memory_of(d).limit = nbytes; });
  m.def("live_bytes", [](int64_t d) -> int64_t { return memory_of(d).live; });
  m.def("in_flight", []() -> int64_t {
    Lock lock(process().mutex);
    return process().in_flight.size();
  });
  m.def("work_queued", []() -> int64_t { return work_queued; });
  m.def("host_waits", []() -> int64_t { return host_waits; });
  m.def("take_violations", [] {
    Lock lock(process().mutex);
    return std::exchange(process().violations, {});
  });
}

}  // namespace
