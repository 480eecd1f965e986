// Threads that run one step together: every thread runs the same function over its share and meets the others at
// barriers. Waiting spins for a short while, then sleeps: the cores are shared. Beside a process that keeps one of two
// cores busy, decoding loses 41 % where barriers spin for 10 us, and 49 % with 50: who spins uses up its share of the
// core. Between jobs spinning may take longer, as long as what lies between two steps: a thread that has not gone to sleep
// starts sooner, which is 3 to 4 % of a small model's step.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "isa.h"
#include "marks.h"

namespace octavo {

// A counter that threads wait on.
class Gate {
 public:
  explicit Gate(int64_t spin_ns) : spin_ns_(spin_ns) {}

  uint32_t now() const { return value_.load(std::memory_order_acquire); }

  void open() {
    value_.fetch_add(1);
    if (sleepers_.load() > 0) {
      std::lock_guard<std::mutex> lock(mutex_);
      wake_.notify_all();
    }
  }

  // Returns once the counter has left `seen`.
  void wait(uint32_t seen) {
    if (spin(seen)) return;
    sleepers_.fetch_add(1);
    {
      std::unique_lock<std::mutex> lock(mutex_);
      wake_.wait(lock, [&] { return value_.load() != seen; });
    }
    sleepers_.fetch_sub(1);
  }

 private:
  bool spin(uint32_t seen) const {
    auto start = std::chrono::steady_clock::now();
    for (;;) {
      for (int i = 0; i < 64; i++) {
        if (now() != seen) return true;
        pause();
      }
      auto waited = std::chrono::steady_clock::now() - start;
      if (std::chrono::duration_cast<std::chrono::nanoseconds>(waited).count() > spin_ns_) return false;
    }
  }

  const int64_t spin_ns_;
  alignas(64) std::atomic<uint32_t> value_{0};
  alignas(64) std::atomic<int> sleepers_{0};
  std::mutex mutex_;
  std::condition_variable wake_;
};

class Pool;

// One thread's view of a step.
struct Thread {
  Pool* pool;
  int id;     // 0 .. count - 1
  int count;  // threads in the pool
  int ticket = 0;  // kernels with shared work counters started so far; the same in every thread
  Marks* marks = nullptr;  // null unless the step is profiled

  // Waits until every thread is here; what they wrote before is visible after.
  void sync();

  // Called before each kernel, with its number.
  void mark(int64_t kernel) {
    if (marks) marks->add(kernel);
  }

  // This thread's part of n equal things: [first, last).
  int64_t first(int64_t n) const { return n * id / count; }
  int64_t last(int64_t n) const { return n * (id + 1) / count; }

  // Calls f(i) for the i in 0..n-1 that this thread draws; each is drawn by one thread.
  template <class Fn>
  void share(int64_t n, Fn f);
};

class Pool {
 public:
  static constexpr int TICKETS = 4;  // work counters in rotation; a barrier lies between two uses of one

  // Throws std::system_error where the system has no more threads.
  explicit Pool(int count) : count_(count < 1 ? 1 : count) {
    try {
      for (int id = 1; id < count_; id++) workers_.emplace_back([this, id] { work(id); });
    } catch (...) {
      finish();  // a running thread must not be destroyed
      throw;
    }
  }

  ~Pool() { finish(); }

  int count() const { return count_; }

  // Runs job on every thread, the caller's included, and returns when all are done.
  template <class Job>
  void run(const Job& job) {
    job_ = &job;
    call_ = [](const void* what, Thread& thread) { (*static_cast<const Job*>(what))(thread); };
    for (auto& c : counters_) c.value = 0;
    start_.open();
    play(0);
  }

  void barrier() {
    if (count_ == 1) return;
    uint32_t seen = phase_.now();
    if (arrived_.fetch_add(1) + 1 < count_) return phase_.wait(seen);
    arrived_.store(0);
    phase_.open();
  }

  std::atomic<int64_t>& counter(int ticket) { return counters_[ticket % TICKETS].value; }

 private:
  struct alignas(64) Counter { std::atomic<int64_t> value{0}; };

  void finish() {
    stop_ = true;
    start_.open();
    for (auto& w : workers_) w.join();
  }

  void play(int id) {
    FloatState same;
    Thread thread{this, id, count_};
    call_(job_, thread);
    barrier();
  }

  void work(int id) {
    for (uint32_t seen = 0;; seen++) {
      start_.wait(seen);
      if (stop_) return;
      play(id);
    }
  }

  const int count_;
  const void* job_ = nullptr;
  void (*call_)(const void* job, Thread& thread) = nullptr;
  std::atomic<bool> stop_{false};
  Gate start_{500000}, phase_{10000};
  alignas(64) std::atomic<int> arrived_{0};
  Counter counters_[TICKETS];
  std::vector<std::thread> workers_;
};

inline void Thread::sync() {
  mark(OCTAVO_WAIT);
  pool->barrier();
  mark(OCTAVO_RESUME);
}

template <class Fn>
void Thread::share(int64_t n, Fn f) {
  auto& counter = pool->counter(ticket);
  // The counter used next but one is free: every thread has passed the barrier after its last use.
  if (id == 0) pool->counter(ticket + 2) = 0;
  ticket++;
  for (int64_t i; (i = counter.fetch_add(1, std::memory_order_relaxed)) < n;) f(i);
}

}  // namespace octavo
