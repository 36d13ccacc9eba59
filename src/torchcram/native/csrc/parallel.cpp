// Threads: those of the OpenMP runtime that torch uses, or a pool of our own where there is none.
//
// Two pools on the same cores would be in each other's way: OpenMP threads keep spinning for a
// while after a parallel region. GNU OpenMP hangs in a forked child, so there our own pool takes
// over.
#include <pthread.h>
#include <stdlib.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "packed.h"

namespace torchcram {

namespace {

struct Work {
  Task task;
  const void* job;
  int64_t count, step;
  std::atomic<int64_t> next{0};
};

void take_part(void* data) {
  Work& work = *static_cast<Work*>(data);
  for (int64_t first; (first = work.next.fetch_add(work.step)) < work.count;)
    for (int64_t i = first; i < first + work.step && i < work.count; ++i) work.task(work.job, i);
}

class Pool {
 public:
  // False where the pool is busy.
  bool run(Work& work, int threads) {
    std::unique_lock<std::mutex> turn(turn_, std::try_to_lock);
    if (!turn) return false;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      for (; started_ < threads - 1; ++started_) std::thread([this] { serve(); }).detach();
      work_ = &work;
      wanted_ = threads - 1;
    }
    wake_.notify_all();
    take_part(&work);
    std::unique_lock<std::mutex> lock(mutex_);
    wanted_ = 0;
    idle_.wait(lock, [this] { return busy_ == 0; });
    return true;
  }

 private:
  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [this] { return wanted_ > 0; });
      --wanted_;
      ++busy_;
      Work* work = work_;
      lock.unlock();
      take_part(work);
      lock.lock();
      if (--busy_ == 0) idle_.notify_all();
    }
  }

  std::mutex turn_, mutex_;
  std::condition_variable wake_, idle_;
  Work* work_ = nullptr;
  int started_ = 0, wanted_ = 0, busy_ = 0;
};

typedef void (*OpenMP)(void (*)(void*), void*, unsigned, unsigned);
std::atomic<OpenMP> openmp{nullptr};
std::atomic<Pool*> pool{nullptr};

void after_fork() {  // threads do not survive a fork; the memory of the old pool is given up
  openmp = nullptr;
  pool = new Pool;
}

Pool& own_pool() {
  static std::once_flag once;
  std::call_once(once, [] {
    if (pool.load() == nullptr) pool = new Pool;
  });
  return *pool.load();
}

struct AtFork {
  AtFork() { pthread_atfork(nullptr, nullptr, after_fork); }
} at_fork;

struct Memory {
  float* data = nullptr;
  size_t floats = 0;
  ~Memory() { free(data); }
};

}  // namespace

void use_openmp(void* parallel) { openmp = reinterpret_cast<OpenMP>(parallel); }

void parallel(Task task, const void* job, int64_t count, int threads) {
  if (threads > count) threads = int(count);
  const int64_t step = count / (threads * 8);  // neighbours share what they read
  Work work{task, job, count, step > 1 ? step : 1, {}};
  if (threads > 1) {
    if (OpenMP region = openmp.load()) return region(take_part, &work, unsigned(threads), 0);
    if (own_pool().run(work, threads)) return;
  }
  take_part(&work);
}

float* scratch(int slot, size_t floats) {
  static thread_local Memory memories[5];
  Memory& memory = memories[slot];
  if (memory.floats < floats) {
    free(memory.data);
    memory.floats = (floats + 1023) / 1024 * 1024;
    void* data = nullptr;
    if (posix_memalign(&data, 4096, memory.floats * sizeof(float)) != 0) abort();
    memory.data = static_cast<float*>(data);
  }
  return memory.data;
}

}  // namespace torchcram
