// The checksum of IPv4 without options: its first flit waits for the second.
module IPChecksum (
    input clk,
    input rst,
    input [511:0] in0_data,
    input in0_valid,
    output in0_ready,
    output [511:0] out0_data,
    output out0_valid,
    input out0_ready,
    input sig_valid,
    input [511:0] sig_data,
    output ans_valid,
    output [511:0] ans_data
);
    assign ans_valid = sig_valid;
    function [15:0] turned(input [15:0] half);
        turned = {half[7:0], half[15:8]};
    endfunction
    assign ans_data = sig_data;
    reg have, fix;
    reg [511:0] held;
    reg [19:0] partial;
    integer i;
    reg [19:0] total;
    always @* begin
        total = 20'd0;
        for (i = 7; i < 16; i = i + 1)
            if (i != 12) total = total + turned(in0_data[16 * i +: 16]);
    end
    wire [19:0] sum = partial + turned(in0_data[15:0]);
    wire [16:0] once = sum[15:0] + sum[19:16];
    wire [15:0] twice = once[15:0] + once[16];
    wire mend = fix && !in0_data[256];
    assign in0_ready = !have || out0_ready;
    assign out0_valid = have && (in0_valid || held[257]);
    assign out0_data = {held[511:208], mend ? turned(~twice) : held[207:192], held[191:0]};
    always @(posedge clk)
        if (rst) have <= 1'b0;
        else if (in0_valid && in0_ready) begin
            have <= 1'b1;
            held <= in0_data;
            partial <= total;
            fix <= in0_data[256] && !in0_data[257]
                && turned(in0_data[111:96]) == 16'h0800 && in0_data[119:112] == 8'h45;
        end else if (out0_valid && out0_ready) have <= 1'b0;
endmodule
