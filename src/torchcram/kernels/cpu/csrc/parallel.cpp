// Threads: those of the OpenMP runtime that torch uses, or our own pool if there is none.
//
// Two pools on the same cores would compete: OpenMP threads keep spinning for a while after a
// parallel region. GNU OpenMP hangs in a forked child, so our own pool takes over there.
#include <pthread.h>
#include <stdlib.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <new>
#include <thread>

#include "packed.h"

namespace torchcram {

namespace {

struct Work {
  Task task;
  const void* job;
  int64_t count, step;
  std::atomic<int64_t> next{0};
  std::atomic<bool> failed{false};
};

// No exception leaves it: neither OpenMP nor the threads of the pool could pass one on.
void run_tasks(void* data) noexcept {
  Work& work = *static_cast<Work*>(data);
  try {
    for (int64_t first; (first = work.next.fetch_add(work.step)) < work.count;)
      for (int64_t i = first; i < first + work.step && i < work.count; ++i) work.task(work.job, i);
  } catch (...) {
    work.failed = true;
    work.next = work.count;  // the other threads stop as well
  }
}

class Pool {
 public:
  // Returns false if the pool is busy.
  bool run(Work& work, int threads) {
    std::unique_lock<std::mutex> turn(turn_, std::try_to_lock);
    if (!turn) return false;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      start(threads - 1);
      work_ = &work;
      requested_ = threads - 1;
    }
    wake_.notify_all();
    run_tasks(&work);
    std::unique_lock<std::mutex> lock(mutex_);
    requested_ = 0;
    idle_.wait(lock, [this] { return busy_ == 0; });
    return true;
  }

 private:
  // If a thread cannot be started, the existing ones do the work.
  void start(int threads) {
    try {
      for (; started_ < threads; ++started_) std::thread([this] { work_loop(); }).detach();
    } catch (...) {
    }
  }

  void work_loop() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [this] { return requested_ > 0; });
      --requested_;
      ++busy_;
      Work* work = work_;
      lock.unlock();
      run_tasks(work);
      lock.lock();
      if (--busy_ == 0) idle_.notify_all();
    }
  }

  std::mutex turn_, mutex_;
  std::condition_variable wake_, idle_;
  Work* work_ = nullptr;
  int started_ = 0, requested_ = 0, busy_ = 0;
};

typedef void (*OpenMP)(void (*)(void*), void*, unsigned, unsigned);
std::atomic<OpenMP> openmp{nullptr};

// The pool is never destroyed: its threads may outlive the other static objects.
alignas(Pool) char pool_memory[sizeof(Pool)];
Pool* const pool = new (pool_memory) Pool;

void after_fork() {  // threads do not survive a fork and may have held locks
  openmp = nullptr;
  new (pool_memory) Pool;
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
  if (count < 1) return;  // an empty batch
  if (threads > count) threads = int(count);
  if (threads < 1) threads = 1;
  const int64_t step = count / (threads * int64_t(8));  // neighbouring tasks read the same data
  Work work{task, job, count, step > 1 ? step : 1, {}, {}};
  OpenMP region = openmp.load();
  if (threads > 1 && region)
    region(run_tasks, &work, unsigned(threads), 0);
  else if (threads == 1 || !pool->run(work, threads))
    run_tasks(&work);
  if (work.failed) throw std::bad_alloc();
}

float* scratch(int slot, size_t floats) {
  static thread_local Memory memories[5];
  Memory& memory = memories[slot];
  if (memory.floats < floats || kFaults) {
    free(memory.data);
    memory.data = nullptr, memory.floats = 0;
    const size_t room = (floats + 1023) / 1024 * 1024;
    void* data = nullptr;
    count_allocation();
    if (posix_memalign(&data, 4096, room * sizeof(float)) != 0) throw std::bad_alloc();
    memory.data = static_cast<float*>(data), memory.floats = room;
  }
  return memory.data;
}

}  // namespace torchcram
