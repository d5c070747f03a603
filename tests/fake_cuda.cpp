// What torch's CPU build asks of CUDA below Python, answered without a device: eight devices whose streams are always done,
// and pinned memory that is the CPU's, but known to be pinned. With -DKIND=MPS, one device that has only a guard.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/MPSHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include <cstdlib>
#include <map>
#include <mutex>

#ifndef KIND
#define KIND CUDA
#define HAS_HOOKS
#endif

namespace {

using namespace c10;
constexpr DeviceIndex kDevices = 8;
thread_local DeviceIndex current = 0;

struct Guard : impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::KIND; }
  Device exchangeDevice(Device device) const override {
    Device before(DeviceType::KIND, current);
    current = device.index();
    return before;
  }
  Device getDevice() const override { return Device(DeviceType::KIND, current); }
  void setDevice(Device device) const override { current = device.index(); }
  void uncheckedSetDevice(Device device) const noexcept override { current = device.index(); }
  Stream getStream(Device device) const override { return Stream(Stream::DEFAULT, device); }
  Stream getDefaultStream(Device device) const override { return Stream(Stream::DEFAULT, device); }
  Stream getNewStream(Device device, int) const override { return Stream(Stream::DEFAULT, device); }
  Stream exchangeStream(Stream stream) const override { return stream; }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }
  void record(void** event, const Stream&, const DeviceIndex, const EventFlag) const override { *event = (void*)1; }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
};

std::mutex lock;
std::map<const char*, size_t> pinned;

void release(void* memory) {
  std::lock_guard<std::mutex> guard(lock);
  pinned.erase(static_cast<const char*>(memory));
  std::free(memory);
}

struct PinnedMemory : Allocator {
  DataPtr allocate(size_t size) override {
    void* memory = std::malloc(size ? size : 1);
    std::lock_guard<std::mutex> guard(lock);
    pinned[static_cast<const char*>(memory)] = size ? size : 1;
    return {memory, memory, &release, Device(DeviceType::CPU)};
  }
  DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, size_t size) const override { default_copy_data(target, source, size); }
};

struct Hooks : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  int getNumGPUs() const override { return kDevices; }
  DeviceIndex deviceCount() const override { return kDevices; }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex device) const override { current = device; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  Allocator* getPinnedMemoryAllocator() const override {
    static PinnedMemory allocator;
    return &allocator;
  }
  at::Generator getNewGenerator(DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  bool isPinnedPtr(const void* data) const override {
    std::lock_guard<std::mutex> guard(lock);
    auto next = pinned.upper_bound(static_cast<const char*>(data));
    if (next == pinned.begin()) return false;
    --next;
    return static_cast<const char*>(data) < next->first + next->second;
  }
};

struct Timer : c10d::Timer {  // of DistributedDataParallel's own log
  explicit Timer(Device) {}
  std::optional<int64_t> measureDifference(Event, Event) override { return std::nullopt; }
};

impl::DeviceGuardImplRegistrar guard(DeviceType::KIND, new Guard());

}  // namespace

#ifdef HAS_HOOKS
namespace at {
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", Hooks)
}

namespace c10d {
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, ::Timer)
}
#else
namespace at {
struct Hooks : MPSHooksInterface {
  void init() const override {}
  bool hasMPS() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
};
C10_REGISTER_TYPED_CLASS(MPSHooksRegistry, "MPSHooks", Hooks)
}
#endif
