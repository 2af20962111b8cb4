package receive

import (
	"errors"
	"io"
	"sync/atomic"
)

// errOverloaded is told to a sender at once: nothing waits in memory.
var errOverloaded = errors.New("too much at once")

// budget is a number of bytes that all bodies share.
type budget struct {
	limit int64
	used  atomic.Int64
}

// fits tells whether n bytes are free now. It takes none.
func (b *budget) fits(n int64) bool { return b.used.Load()+n <= b.limit }

func (b *budget) take(n int64) bool {
	if b.used.Add(n) <= b.limit {
		return true
	}
	b.used.Add(-n)
	return false
}

// metered is a body that takes from the budget what has come and keeps it until
// give, since the body stays in memory until its request is answered. What was
// only declared takes nothing: a sender that promises and does not send holds
// up nobody.
type metered struct {
	io.ReadCloser
	budget *budget
	taken  int64
}

func (m *metered) Read(p []byte) (int, error) {
	n, err := m.ReadCloser.Read(p)
	if !m.budget.take(int64(n)) {
		return 0, errOverloaded
	}
	m.taken += int64(n)
	return n, err
}

func (m *metered) give() { m.budget.used.Add(-m.taken) }
