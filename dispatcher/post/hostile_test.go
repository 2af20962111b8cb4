package post

import (
	"fmt"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"postern/integration/harness/receiver"
)

// A thousand hostile receivers at once cost bounded memory and bounded time,
// leave no goroutine behind, and healthy traffic flows meanwhile.
//
// Not parallel: it measures the process.
func TestThousandHostileReceivers(t *testing.T) {
	before := goleak.IgnoreCurrent()
	head := "HTTP/1.1 %d OK\r\nContent-Length: 1000000\r\n\r\n"
	hostile, err := receiver.Listen(receiver.ByPath(map[string]receiver.Script{
		"/0": receiver.Endless(200),
		"/1": receiver.Endless(500),
		"/2": receiver.Drip(fmt.Sprintf(head, 200)+strings.Repeat("y", 1000), 60, 50*msec),
		"/3": receiver.Drip("HTTP/1.1 200 OK\r\n"+strings.Repeat("X: y\r\n", 1000), 6, 50*msec),
		"/4": receiver.GzipBomb(4 << 20),
		"/5": receiver.EndlessHeader(),
		"/6": receiver.BigHeader(1 << 20),
		"/7": receiver.EndlessInformation(),
		"/8": receiver.Hang,
		"/9": receiver.StopReading,
	}, receiver.Reset), receiver.Keeping(receiver.Counts))
	if err != nil {
		t.Fatal(err)
	}
	healthy, err := receiver.Listen(receiver.Status(200), receiver.Keeping(receiver.Counts))
	if err != nil {
		t.Fatal(err)
	}
	tr := New(loopback())

	const limit = 3 * time.Second
	small, large := []byte("{}"), make([]byte, 1<<20)
	highest := watchMemory(t)
	var all sync.WaitGroup
	var status200, status500, none, late atomic.Int64
	for i := range 1000 {
		all.Go(func() {
			body := small
			if i%10 == 9 { // more than the socket's buffers hold
				body = large
			}
			r := tr.Post(t.Context(), Request{URL: fmt.Sprintf("%s/%d", hostile.URL, i%10), Body: body, Timeout: limit})
			switch r.Status {
			case 200:
				status200.Add(1)
			case 500:
				status500.Add(1)
			case 0:
				none.Add(1)
			}
			if r.Duration > 4*limit {
				late.Add(1)
			}
		})
	}
	for range 200 {
		if r := tr.try(t, healthy.URL, time.Minute); r.Status != 200 {
			t.Errorf("healthy: %+v", r)
		}
	}
	all.Wait()
	if n := status200.Load() + status500.Load() + none.Load(); n != 1000 || status500.Load() > 100 || status200.Load() > 300 {
		t.Errorf("%d answered 200, %d 500, %d not", status200.Load(), status500.Load(), none.Load())
	}
	if late.Load() > 0 {
		t.Errorf("%d returned long after their deadline", late.Load())
	}
	t.Logf("%d answered 200, %d 500, %d not; %d MiB at most", status200.Load(), status500.Load(), none.Load(), highest()>>20)
	if most := highest(); most > 512<<20 {
		t.Errorf("%d MiB in use", most>>20)
	}
	tr.Close()
	hostile.Close()
	healthy.Close()
	goleak.VerifyNone(t, before)
}

// watchMemory returns the high-water mark of heap and stacks since the call,
// and stops watching when that is first asked for.
func watchMemory(t *testing.T) func() uint64 {
	t.Helper()
	stop, done := make(chan struct{}), make(chan struct{})
	var highest uint64
	go func() {
		defer close(done)
		for {
			var m runtime.MemStats
			runtime.ReadMemStats(&m)
			highest = max(highest, m.HeapInuse+m.StackInuse)
			select {
			case <-stop:
				return
			case <-time.After(20 * msec):
			}
		}
	}()
	return sync.OnceValue(func() uint64 { close(stop); <-done; return highest })
}
