// Allocation failure on demand, for tests. Only builds with TORCHCRAM_FAULTS contain it.
#include <stdlib.h>

#include <atomic>
#include <new>

#include "packed.h"

namespace {
std::atomic<int64_t> remaining{0};
}

void torchcram::count_allocation() {
  int64_t left = remaining.load();
  while (left > 0 && !remaining.compare_exchange_weak(left, left - 1)) {
  }
  if (left == 1) throw std::bad_alloc();
}

// The library is linked so that only its own calls of `new` come here.
void* operator new(size_t bytes) {
  torchcram::count_allocation();
  if (void* memory = malloc(bytes ? bytes : 1)) return memory;
  throw std::bad_alloc();
}
void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
  try {
    return operator new(bytes);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}
void operator delete(void* memory) noexcept { free(memory); }
void operator delete(void* memory, size_t) noexcept { free(memory); }

// Makes the n-th allocation from now on fail; none for 0. Returns the number of allocations that
// were left until the failure that an earlier call requested: 0 if it has happened or was not
// requested.
extern "C" __attribute__((visibility("default"))) int64_t torchcram_fail_allocation(int64_t n) {
  return remaining.exchange(n);
}
