package dispatcher

import (
	"sync"
	"time"
)

// wakeInterval is the least time between two hints of new work that are
// followed; the second of them is followed late. Anybody may send notifications.
const wakeInterval = 2 * time.Millisecond

// wakeUps passes hints of new work on to the claiming loop, the first at once.
type wakeUps struct {
	to      chan<- struct{}
	mu      sync.Mutex
	last    time.Time
	waiting bool
}

func (w *wakeUps) hint() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.waiting {
		return
	}
	if early := wakeInterval - time.Since(w.last); early > 0 {
		w.waiting = true
		time.AfterFunc(early, func() {
			w.mu.Lock()
			w.waiting = false
			w.mu.Unlock()
			w.hint()
		})
		return
	}
	w.last = time.Now()
	select {
	case w.to <- struct{}{}:
	default:
	}
}
