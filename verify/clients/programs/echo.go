// The two ends of sockets_echo.py in Go, whose programs make system calls of their own and know no preloaded
// library:
//
//	echo serve PORT        echoes until the end of each connection, then says how much it was;
//	echo ask PORT ROUNDS   four conversations at once, every byte looked at.
package main

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"sync"
)

func serve(port string) error {
	listener, err := net.Listen("tcp", "127.0.0.1:"+port)
	if err != nil {
		return err
	}
	for {
		peer, err := listener.Accept()
		if err != nil {
			return err
		}
		go func() {
			defer peer.Close()
			block := make([]byte, 65536)
			total := 0
			for {
				count, err := peer.Read(block)
				if count > 0 {
					total += count
					if _, err := peer.Write(block[:count]); err != nil {
						return
					}
				}
				if err != nil {
					break
				}
			}
			fmt.Fprintf(peer, "total %d\n", total)
		}()
	}
}

func ask(port string, rounds int) error {
	peer, err := net.Dial("tcp", "127.0.0.1:"+port)
	if err != nil {
		return err
	}
	defer peer.Close()
	sent := 0
	for round := 0; round < rounds; round++ {
		data := make([]byte, (round*round*37)%9000+1)
		for index := range data {
			data[index] = byte((sent + index) % 251)
		}
		if _, err := peer.Write(data); err != nil {
			return err
		}
		back := make([]byte, len(data))
		if _, err := io.ReadFull(peer, back); err != nil {
			return err
		}
		if !bytes.Equal(data, back) {
			return fmt.Errorf("round %d: other bytes came back", round)
		}
		sent += len(data)
	}
	if err := peer.(*net.TCPConn).CloseWrite(); err != nil {
		return err
	}
	rest, err := io.ReadAll(peer)
	if err != nil {
		return err
	}
	if string(rest) != fmt.Sprintf("total %d\n", sent) {
		return fmt.Errorf("sent %d, told %q", sent, rest)
	}
	return nil
}

func main() {
	if os.Args[1] == "serve" {
		fmt.Fprintln(os.Stderr, serve(os.Args[2]))
		os.Exit(1)
	}
	rounds, _ := strconv.Atoi(os.Args[3])
	var all sync.WaitGroup
	for range 4 {
		all.Add(1)
		go func() {
			defer all.Done()
			if err := ask(os.Args[2], rounds); err != nil {
				fmt.Fprintln(os.Stderr, err)
				os.Exit(1)
			}
		}()
	}
	all.Wait()
	fmt.Println("echoed")
}
